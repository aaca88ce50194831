"""Prediction in the form of TensorFlow Serving's REST API, which is KServe's protocol v1 too: /v1/models/NAME:predict,
and the states of versions. Calls become infer requests to the same models, through the same services as all others."""
