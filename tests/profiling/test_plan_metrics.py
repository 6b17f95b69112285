"""What a plan takes from a running server: a real HTTP server with vLLM's lines."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kvferry.profiling.plan import cache_dtype, main
from kvferry.profiling.plan_metrics import Server, read_server, server_from
from kvferry.profiling.plan_model import Model

SHAPES = Path(__file__).resolve().parents[2] / "docs" / "shapes"

TEXT = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",{block},cache_dtype="fp8",engine="0"}} 1.0
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="{model}"}} 1.5
vllm:request_prefill_time_seconds_sum{{engine="1",model_name="{model}"}} 0.5
vllm:request_prefill_kv_computed_tokens_sum{{engine="0",model_name="{model}"}} 20000.0
vllm:request_prefill_kv_computed_tokens_count{{engine="0",model_name="{model}"}} 4.0
python_info{{version="3.11"}} 1.0
"""


def text_of(model: str) -> str:
    return TEXT.format(model=model, block='effective_attention_block_size="32"')


class Answers(BaseHTTPRequestHandler):
    text = ""

    def do_GET(self) -> None:
        found = self.path == "/metrics"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(self.text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_asked(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(SHAPES / "llama-3.1-8b.json")
    monkeypatch.setattr(Answers, "text", text_of(model))
    assert read_server(address) == Server(model, 32, "fp8", 10_000.0)
    assert main([address, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["model"], plan["block_tokens"], plan["dtype"]) == (model, 32, "fp8")
    assert plan["prefill_tokens_per_s"] == 10_000.0
    assert plan["break_even_tokens"] is not None
    # What is given wins over what the server says.
    given = ["--dtype", "bfloat16", "--block-size", "16", "--prefill-rate", "5000"]
    assert main([model, "--metrics", f"{address}/metrics", "--json", *given]) == 0
    plan = json.loads(capsys.readouterr().out)
    said = (plan["block_tokens"], plan["dtype"], plan["prefill_tokens_per_s"])
    assert said == (16, "bfloat16", 5000.0)


def test_a_served_name_that_leads_nowhere_asks_for_the_config(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Answers, "text", text_of("served"))
    assert main([address]) == 2
    assert "no model at 'served'" in capsys.readouterr().err
    assert main([address, "--config", str(SHAPES / "llama-3.1-8b.json")]) == 0


def test_what_does_not_answer_as_vllm_does_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="does not answer"):
        read_server(f"{address}/elsewhere")
    monkeypatch.setattr(Answers, "text", 'python_info{version="3.11"} 1.0\n')
    with pytest.raises(ValueError, match="names no model"):
        read_server(address)


def test_before_the_first_request_there_is_no_rate() -> None:
    text = 'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
    assert server_from(text, "here") == Server("m", None, None, None)


@pytest.mark.parametrize(
    ("asked", "served", "weights", "expected"),
    [
        ("auto", None, "bfloat16", "bfloat16"),
        ("auto", None, "float32", "bfloat16"),  # as vLLM does on its own
        ("auto", "auto", "float16", "float16"),
        ("auto", "fp8", "bfloat16", "fp8"),
        ("float32", "fp8", "bfloat16", "float32"),
    ],
)
def test_the_cache_type_that_is_served(
    asked: str, served: str | None, weights: str, expected: str
) -> None:
    server = Server("m", None, served, None) if served else None
    assert cache_dtype(asked, server, Model("m", (), weights, 1)) == expected


def test_a_cache_type_of_no_known_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a KV cache of nvfp4; allowed: float32"):
        cache_dtype("auto", Server("m", None, "nvfp4", None), Model("m", (), "bfloat16", 1))
