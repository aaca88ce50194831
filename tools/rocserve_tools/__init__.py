"""What is not serving: measures, prepares and tries models. `rocserve` finds these verbs by an entry point."""

VERBS = {
    "get": ("rocserve_tools.get.verb", "download published models with their configurations"),
    "bench": ("rocserve_tools.bench", "time a model in its engine, without a server"),
    "tune": ("rocserve_tools.tune.verb", "recommend a batch size and a number of instances"),
    "compare": ("rocserve_tools.compare", "compare the precisions of a model on MIGraphX: errors and speeds"),
    "quantise": ("rocserve_tools.quantise.verb", "quantise a PyTorch program to int8"),
    "convert-mar": ("rocserve_tools.convert_mar", "make a model's folder of a TorchServe archive"),
    "classify": ("rocserve_tools.images.classify", "classify images with a model of a running server"),
    "detect": (
        "rocserve_tools.images.detect",
        "find objects in images with a model of a running server, and draw them",
    ),
}
"""Verb -> module with its `VERB`, and the help text; without an import, so that `rocserve --help` needs no time."""
