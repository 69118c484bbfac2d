"""The same service with LitServe and its batching.

python benchmarks/services/lit.py MODEL PORT
"""

from __future__ import annotations

import base64
import io
import sys

import litserve
import numpy as np
import torch
from PIL import Image

from vitrail.weights import open_run


class Service(litserve.LitAPI):
    def setup(self, device):
        self.model, self.card = open_run(sys.argv[1], device)

    def decode_request(self, request):
        picture = Image.open(io.BytesIO(base64.b64decode(request["images"][0]))).convert("RGB")
        return self.card.preprocess(np.array(picture))

    def batch(self, inputs):
        return torch.stack(inputs)

    def predict(self, x):
        with torch.inference_mode():
            return self.model(x).softmax(dim=1)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        best = output.topk(5)
        labels = [self.card.classes[i] for i in best.indices.tolist()]
        return {"predictions": [{"labels": labels, "probabilities": best.values.tolist()}]}


if __name__ == "__main__":
    api = Service(max_batch_size=16, batch_timeout=0.005)
    litserve.LitServer(api, accelerator="cpu", healthcheck_path="/ready").run(
        port=int(sys.argv[2]), log_level="warning", generate_client_file=False
    )
