"""The command lines of `rocserve classify` and `rocserve detect`. What they need is imported when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rocserve.flags.arguments import at_least


def add_image_verbs(verbs: Any) -> Mapping[str, Callable[[argparse.Namespace], int]]:
    """Add the parsers to argparse's collection of them; returns what runs each verb."""
    classify = verbs.add_parser(
        "classify",
        help="have a running server tell what images show",
        description="Classify images with a model of a running server that takes encoded images and gives"
        " probabilities, such as those of --preprocess=imagenet.",
        allow_abbrev=False,
    )
    _add_common(classify)
    classify.add_argument(
        "--top",
        type=at_least(1, int),
        default=1,
        metavar="K",
        help="how many classes an image, the best first (default 1)",
    )
    detect = verbs.add_parser(
        "detect",
        help="have a running server find objects in images, and draw them",
        description="Find objects in images with a model of a running server that takes encoded images and gives boxes,"
        " such as those of --preprocess=yolov8.",
        allow_abbrev=False,
    )
    _add_common(detect)
    detect.add_argument("--out", type=Path, metavar="DIR", help="draw what was found into PNGs in this folder")
    detect.add_argument(
        "--rows",
        type=at_least(1, int),
        default=10,
        metavar="N",
        help="how many objects an image are printed (default 10)",
    )
    return {"classify": _classify, "detect": _detect}


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="JPEG or PNG files")
    parser.add_argument("--model", required=True, help="the model's name")
    parser.add_argument("--url", default="localhost:8001", help="the server's gRPC address (default localhost:8001)")


def _classify(options: argparse.Namespace) -> int:
    from rocserve.tools.images.classify import run

    return run(options.url, options.model, options.images, options.top)


def _detect(options: argparse.Namespace) -> int:
    from rocserve.tools.images.detect import run

    return run(options.url, options.model, options.images, options.rows, options.out)
