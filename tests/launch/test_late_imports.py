"""What the fork server leaves to the calls that need it."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import longspan.launch.late_imports
from transformers.loss import loss_for_object_detection as loss
from transformers.models.qwen3 import modeling_qwen3

assert "scipy" not in sys.modules and "scipy.optimize" not in sys.modules
assert loss.linear_sum_assignment(3, maximize=True) == (3, True)
assert "scipy.optimize" in sys.modules
from scipy.optimize import linear_sum_assignment
assert linear_sum_assignment(4) == (4, False)
"""


def test_scipy_is_imported_by_the_loss_that_calls_it(tmp_path: Path) -> None:
    (tmp_path / "scipy").mkdir()
    (tmp_path / "scipy/__init__.py").write_text("__version__ = '1.0'\n")
    (tmp_path / "scipy/optimize.py").write_text(
        "def linear_sum_assignment(costs, maximize=False):\n    return costs, maximize\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
