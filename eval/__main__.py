"""lm-eval's own command line with the model ``zoo`` registered: ``python -m zoo.eval run --model zoo --model_args pretrained=...``."""

from lm_eval.__main__ import cli_evaluate

import zoo.eval.lm_eval_model  # noqa: F401 - registers the model

if __name__ == "__main__":
    cli_evaluate()
