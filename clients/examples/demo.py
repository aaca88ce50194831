"""Shows rocserve on real input: starts the server, uses its pipelines, shows their accuracy, and stops the server.

- digits: JPEGs of handwritten digits -> their names; requested with tritonclient's own gRPC client
- detect_shapes: newly drawn pictures -> boxes, measured against the truth
- efficientnet_lite0_image: photographs -> ImageNet's classes; left out if its weights cannot be fetched

The exit status is 0 if at least 97 % of the digits are right, the mean average precision of the shapes is at least
0.9, each photograph has a right class among its best three, and the server ended well.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo_digits import show_digits
from demo_photos import MODEL as PHOTOGRAPHS_MODEL
from demo_photos import show_photographs, with_weights
from demo_server import running_server
from demo_shapes import show_shapes
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("digits", "detect_shapes")


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve the sample repository and put it to use.")
    parser.add_argument("--model-repository", type=Path, default=ROOT / "model_repository")
    parser.add_argument("--images", type=Path, default=ROOT / "tests" / "data" / "digits", help="a folder of digits")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="the folder for pictures and the log")
    options = parser.parse_args()
    digits = sorted(options.images.glob("*.jpg"))
    if not digits:
        print(f"there are no JPEGs in {options.images}", file=sys.stderr)
        return 1

    console = Console()
    options.output.mkdir(parents=True, exist_ok=True)
    repository, has_weights = with_weights(options.model_repository, options.output / "demo-repository", console)
    models = (*MODELS, PHOTOGRAPHS_MODEL) if has_weights else MODELS
    with running_server(repository, models, options.output / "demo-server.log") as address:
        console.print(f"rocserve serves {repository} at {address}", soft_wrap=True)
        console.rule("digits: JPEG -> rocAL -> a small network -> the digit's name")
        right = show_digits(address, digits, options.output, console)
        console.rule("detect_shapes: JPEG -> rocAL -> a small YOLO -> boxes")
        right &= show_shapes(address, options.output, console)
        if has_weights:
            console.rule(f"{PHOTOGRAPHS_MODEL}: JPEG, PNG -> rocAL -> EfficientNet-Lite0 -> label")
            right &= show_photographs(address, options.output, console)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
