"""The digits ensemble: small images and a small network, so that the server's own work dominates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.probe import Outputs
from benchmarks.sample_ensemble import ROOT, SampleEnsemble, read_ensemble

IMAGES = ROOT / "tests" / "data" / "digits"
INPUT, OUTPUT = "ENCODED", "LABEL"


@dataclass(frozen=True, slots=True)
class DigitsEnsemble(SampleEnsemble):
    """Its images are named <index>_<label>.jpg."""

    group: ClassVar[str] = "digits"
    input: ClassVar[str] = INPUT
    output: ClassVar[str] = OUTPUT
    concurrencies: ClassVar[tuple[int, ...]] = (8, 32)

    @property
    def label(self) -> str:
        return self.image.stem.rpartition("_")[2]

    def accepts(self, answer: str) -> bool:
        """See SampleEnsemble."""
        return answer == self.label

    def check(self, outputs: Outputs) -> None:
        """See SampleEnsemble."""
        label = outputs[OUTPUT].item()
        assert label == self.label.encode(), f"label {label!r} for {self.image.name}"


def load_digits() -> DigitsEnsemble:
    """Load the ensemble, with the first of the held-out images."""
    ensemble, members = read_ensemble("digits", {})
    return DigitsEnsemble(ensemble, members, min(IMAGES.glob("*.jpg")))
