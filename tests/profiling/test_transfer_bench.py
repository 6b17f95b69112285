"""The transfer benchmark runs, checks its bytes, and says when a target is missed."""

import json

import pytest
from kvferry.profiling import transfer


def test_it_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--page-kib", "4", "--threads", "1", "--mib", "1", "--rounds", "1"]
    assert transfer.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("store") == text.count("load") == 3
    assert "judged by" in text
    assert transfer.main([*arguments, "--integrity", "full", "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [case["direction"] for case in cases] == ["store", "load"]
    assert all(case["gb_per_s"] > 0 and case["target"] is None for case in cases)


def test_a_missed_target_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--page-kib", "4", "--threads", "1", "--mib", "1", "--rounds", "1"]
    monkeypatch.setitem(transfer.TARGETS, 4096, 1e9)
    assert transfer.main([*arguments, "--integrity", "off", "--check"]) == 1
    assert "MISSED" in capsys.readouterr().out


def test_wrong_bytes_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = transfer.Bench(4096, 1, "off", 1 << 20)
    original = bench.transfer

    def damage(direction: transfer.Direction) -> None:
        original(direction)
        bench.arena.slots[5] ^= 1

    monkeypatch.setattr(bench, "transfer", damage)
    with pytest.raises(RuntimeError, match="not what was stored"):
        bench.check()
    bench.close()


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(SystemExit):
        transfer.main(["--mib", "0"])
