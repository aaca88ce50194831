"""The models that can be fetched: where their files are, and how to tell that they are the right ones."""

from __future__ import annotations

from dataclasses import dataclass

_ZOO = "https://github.com/onnx/models/raw/main/validated/vision"
_ZOO_COPIES = "https://huggingface.co/onnxmodelzoo"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file, the same at each of its addresses."""

    name: str
    """As it is called where it is published."""
    size: int
    """Bytes."""
    sha256: str
    """In hexadecimal digits."""
    addresses: tuple[str, ...]
    """Tried in this order."""

    def at(self, mirror: str) -> RemoteFile:
        """The file in the folder that a mirror's address names."""
        return RemoteFile(self.name, self.size, self.sha256, (f"{mirror.rstrip('/')}/{self.name}",))


CATALOGUE = {
    "resnet50": RemoteFile(
        name="resnet50-v1-12.onnx",
        size=102_576_593,
        sha256="3f03fdef724b22947eed826f1eef1dc5c34151bb4c37d634f1db89dfa2dd1526",
        addresses=(
            f"{_ZOO_COPIES}/resnet50-v1-12/resolve/main/resnet50-v1-12.onnx",
            f"{_ZOO}/classification/resnet/model/resnet50-v1-12.onnx",
        ),
    ),
    "yolov4": RemoteFile(
        name="yolov4.onnx",
        size=257_470_589,
        sha256="1881fe9c506c970d7866cb4bfc33bda791ce46951a3c39c45ace2ff2b9daf369",
        addresses=(
            f"{_ZOO_COPIES}/yolov4/resolve/main/yolov4.onnx",
            f"{_ZOO}/object_detection_segmentation/yolov4/model/yolov4.onnx",
        ),
    ),
}
"""By the model's name in the repository. Sizes and digests are those of the ONNX Model Zoo's own index of large files;
the zoo moved them to its copies in July 2025."""
