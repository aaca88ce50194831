"""The post-processing of YOLO detectors that rocserve contains; config.pbtxt has the numbers."""

from rocserve.presets.detection import TritonPythonModel

__all__ = ["TritonPythonModel"]
