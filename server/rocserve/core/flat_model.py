"""A model without version folders: its file lies directly in a folder, and is version 1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath

LABELS_FILENAME = "labels.txt"
_BESIDE = ("config.pbtxt", LABELS_FILENAME)


@dataclass(frozen=True, slots=True)
class FlatModel:
    file: str = ""
    """Its name; "" = one of those that the backends know their models by."""
    is_alone: bool = False
    """The folder is not the model's own, so that most of its files are none of the model: see `has`."""

    def has(self, name: str) -> bool:
        """Whether a file of the folder is the model's: all are of its own folder; else its file, those that are named
        after that (`resnet.onnx.data`, `resnet.onnx_data`, `resnet.bin` of `resnet.onnx`), its labels and its
        configuration."""
        if not self.is_alone or name in _BESIDE:
            return True
        return name.startswith((self.file, f"{PurePath(self.file).stem}."))

    def files(self, folder: Path) -> tuple[Path, ...]:
        """Those of the folder that are there."""
        return tuple(path for path in sorted(folder.iterdir()) if self.has(path.name) and path.is_file())
