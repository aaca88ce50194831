"""What model files say of themselves, read without MIGraphX: ONNX, GraphDef, compiled programs."""
