"""The whole of rocserve on real input: start the server, put its pipelines to use, show how well they do, stop.

- digits: JPEGs of handwritten digits -> their names; asked with tritonclient's own gRPC client
- detect_shapes: pictures drawn just now -> boxes, measured against the truth
- classify_image and detect_objects: ResNet-50 and YOLOv4, with untrained weights where real ones were not fetched

The exit status is 0 when at least 97 % of the digits are right, the mean average precision of the shapes is at least
0.9, every image got its answers, and the server ended well.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from demo_digits import show_digits
from demo_repository import complete_repository
from demo_server import running_server
from demo_shapes import show_shapes
from demo_vision import show_vision
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "tests" / "data" / "shapes"
MODELS = ("digits", "detect_shapes", "classify_image", "detect_objects")


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve the sample repository and put it to use.")
    parser.add_argument("--model-repository", type=Path, default=ROOT / "model_repository")
    parser.add_argument("--images", type=Path, default=ROOT / "tests" / "data" / "digits", help="a folder of digits")
    parser.add_argument(
        "--photos", type=Path, nargs="+", metavar="IMAGE", help="for ResNet-50 and YOLOv4 (default pictures of shapes)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="the folder for pictures and the log")
    options = parser.parse_args()
    digits = sorted(options.images.glob("*.jpg"))
    photos = options.photos or [Path(os.path.relpath(path)) for path in sorted(SHAPES.glob("*.jpg"))[1:5]]
    if not digits:
        print(f"there are no JPEGs in {options.images}", file=sys.stderr)
        return 1

    console = Console()
    options.output.mkdir(parents=True, exist_ok=True)
    repository = complete_repository(options.model_repository, options.output / "demo-repository")
    with running_server(repository.folder, MODELS, options.output / "demo-server.log") as address:
        console.print(f"rocserve serves {repository.folder} at {address}", soft_wrap=True)
        console.rule("digits: JPEG -> rocAL -> a small network -> the digit's name")
        digits_right = show_digits(address, digits, options.output, console)
        console.rule("detect_shapes: JPEG -> rocAL -> a small YOLO -> boxes")
        shapes_right = show_shapes(address, options.output, console)
        console.rule("classify_image, detect_objects: JPEG -> rocAL -> ResNet-50, YOLOv4")
        vision_right = show_vision(address, photos, repository.is_untrained, options.output, console)
    return 0 if digits_right and shapes_right and vision_right else 1


if __name__ == "__main__":
    sys.exit(main())
