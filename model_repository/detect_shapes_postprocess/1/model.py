"""The post-processing of YOLO detectors that rocserve brings along; config.pbtxt has the numbers."""

from rocserve.presets.detection import TritonPythonModel

__all__ = ["TritonPythonModel"]
