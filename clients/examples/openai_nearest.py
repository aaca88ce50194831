"""Sorts texts by their nearness to a question with OpenAI's own client. Needs `pip install openai`, and a server with a
model of text:

rocserve get minilm --model-repository texts
rocserve serve texts
python clients/examples/openai_nearest.py "Who barks?" "a dog" "a cat" "a stone"
"""

from __future__ import annotations

import argparse

import numpy as np
from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--key", default="none", help="the secret of --http-restricted-api=inference, if it is set")
    given = parser.parse_args()
    with OpenAI(base_url=given.url, api_key=given.key) as client:
        answer = client.embeddings.create(model=given.model, input=[given.question, *given.texts])
    question, *vectors = (np.array(one.embedding) for one in answer.data)
    nearness = [float(one @ question / np.linalg.norm(one) / np.linalg.norm(question)) for one in vectors]
    for near, text in sorted(zip(nearness, given.texts, strict=True), reverse=True):
        print(f"{near:.3f}  {text}")


if __name__ == "__main__":
    main()
