"""The page of an evaluation: every figure is in it, curves stand where there are several buckets, nothing is markup."""

from typing import Any

from longspan.report.eval_page import eval_page

ROW: dict[str, Any] = {
    "step": 4,
    "eval_loss": 3.25,
    "eval_perplexity": 25.79,
    "eval_token_accuracy": 0.125,
    "eval_documents": 3,
    "eval_tokens": 261,
    "eval_targets": 258,
    "cp": 2,
    "cp_comm_type": ["p2p"],
    "seconds": 0.5,
    "by_length": [[0, 127, 3.5, 100, 2], [128, 255, 3.0, 158, 1]],
    "by_position": [[0, 127, 3.25, 258, 3]],
}
RECORD: dict[str, Any] = {
    "target": "runs/<b>",
    "kind": "run",
    "world": 2,
    "parallel": {"tp": 2, "pp": 1},
    "changes": [{"key": "parallel.tp", "before": 4, "now": 2, "why": "2 ranks"}],
    "evaluations": [ROW],
}
DIFFERENCE = {
    "name": "",
    "unit": "loss",
    "first": 3.25,
    "other": 3.0,
    "difference": -0.25,
    "standard_error": None,
    "documents": 3,
    "lower": 2,
    "by_length": [[0, 127, 3.5, 3.1, 2]],
}


def test_one_model() -> None:
    page = eval_page(RECORD)
    assert "runs/&lt;b&gt;" in page and "<b>runs" not in page
    assert "run, step 4 · 2 ranks · tp 2" in page and "parallel.tp 4 became 2 (2 ranks)" in page
    for cell in ("held out", "p2p", "3.250000", "0.125000", "token accuracy", "261", "500 ms"):
        assert cell in page
    assert "Loss by document length" in page and "Loss by position" not in page  # of one bucket there is no curve


def test_two_models() -> None:
    other = {**RECORD, "target": "base", "kind": "folder", "differences": [DIFFERENCE]}
    page = eval_page({**RECORD, "compare": other})
    assert "loss of base minus that of runs/&lt;b&gt;: -0.250000; 2 of 3 documents have a lower value." in page
    assert "base, held out" in page and "-0.400000" in page
