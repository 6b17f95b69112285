"""What has to be set before torch is imported by whichever test comes first."""

import os

# Hybrid models are not deterministic with more, and idle threads that spin disturb the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
