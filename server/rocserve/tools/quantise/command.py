"""The command line of `rocserve quantise`. What it needs is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rocserve.flags.arguments import at_least

METHODS = ("dynamic", "static", "qat")

_SAMPLES = 128


def add_quantise_verb(verbs: Any) -> Mapping[str, Callable[[argparse.Namespace], int]]:
    """Add the parser to argparse's collection of them; returns what runs the verb."""
    parser = verbs.add_parser(
        "quantise",
        help="make a PyTorch program compute in int8",
        description="Quantise a program of torch.export with torchao, and compare it with the original on the data."
        " dynamic: linear layers, each row of their inputs scaled as it comes; static: layers and what is between them,"
        " scaled by the data; qat: as static, after the network has been trained to be so.",
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, metavar="MODEL.pt2", help="a program that torch.export.save has written")
    parser.add_argument("--method", required=True, choices=METHODS, help="dynamic, static or qat")
    parser.add_argument(
        "--data",
        required=True,
        type=Path,
        metavar="FILES",
        help="samples of the inputs: an .npz file, an .npy file, or a folder of .npy files or images",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="write it there, as .pt2 or .onnx")
    parser.add_argument(
        "--samples", type=at_least(1, int), default=_SAMPLES, metavar="N", help=f"of the data (default {_SAMPLES})"
    )
    parser.add_argument(
        "--pipeline",
        type=Path,
        metavar="FILE.json",
        help="the rocAL pipeline that images go through",
    )
    parser.add_argument(
        "--train",
        type=Path,
        metavar="FILE.py",
        help="for qat: holds train(network), which trains the network that it is given",
    )
    parser.set_defaults(refuse=parser.error)
    return {"quantise": _quantise}


def _quantise(options: argparse.Namespace) -> int:
    if (options.train is None) == (options.method == "qat"):
        options.refuse("--method qat needs --train, and no other method takes it")
    from rocserve.tools.printing import console_on
    from rocserve.tools.quantise.verb import Order, quantise
    from rocserve.tools.running import guarded

    order = Order(
        options.model, options.method, options.data, options.out, options.samples, options.pipeline, options.train
    )
    return guarded("quantise", str(options.model), lambda: quantise(order, console_on()))
