"""lm-evaluation-harness with any cache: importing this package registers the model `kvlayers` with the harness."""

try:
    import lm_eval  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvlayers.evaluation.harness needs the package lm-eval, but importing lm_eval failed ({error}): run "
        '`pip install "kvlayers[eval]"`.'
    ) from error

from kvlayers.evaluation.harness.model import KVLayersLM

__all__ = ["KVLayersLM"]
