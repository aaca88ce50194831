"""The bare loop as a process: `python -m benchmarks.bare_loop STEPS IMAGE INPUT OUTPUT`.

Each line on standard input, "BATCH SECONDS", runs the ensemble of STEPS on batches of the image in file IMAGE for that
time and is answered by a line of JSON: images, seconds, and the value of OUTPUT for the first image. Between lines it
sleeps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.bare_ensemble import BareEnsemble, image_batch, read_steps


def main() -> None:
    steps_file, image_file, input_name, output_name = sys.argv[1:]
    ensemble = BareEnsemble(read_steps(Path(steps_file)))
    encoded = Path(image_file).read_bytes()
    for line in sys.stdin:
        batch_size, seconds = line.split()
        images = image_batch(encoded, int(batch_size))
        count = 0
        begin = now = time.perf_counter()
        while now - begin < float(seconds):
            outputs = ensemble.run({input_name: images}, [output_name])
            count += len(images)
            now = time.perf_counter()
        first = outputs[output_name].reshape(-1)[0]
        answer = first.decode() if isinstance(first, bytes) else str(first)
        print(json.dumps({"images": count, "seconds": now - begin, "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
