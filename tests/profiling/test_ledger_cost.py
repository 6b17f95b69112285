"""The ledger's cost benchmark runs against vLLM's own manager; no timing is asserted."""

import json

import pytest
from kvferry.profiling.ledger_cost import main

pytest.importorskip("vllm")


def test_both_sides_find_and_store_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sizes", "8192", "--rounds", "2", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert [cost["operation"] for cost in costs] == [
        "lookup, keys used before",
        "lookup, fresh keys in random order",
        "store, plan",
        "store, complete",
    ]
    assert all(cost["kvferry_s"] > 0 and cost["vllm_s"] > 0 for cost in costs)
    assert all(cost["ratio"] == cost["vllm_s"] / cost["kvferry_s"] for cost in costs)


@pytest.mark.parametrize("wrong", [["--sizes", "100"], ["--rounds", "0"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(wrong)
    assert stopped.value.code == 2
