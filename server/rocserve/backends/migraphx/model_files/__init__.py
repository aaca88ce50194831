"""Reads model files without MIGraphX: ONNX, GraphDef, compiled programs."""
