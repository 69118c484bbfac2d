"""The service that people write today: FastAPI and PyTorch, one image per request, one forward pass per image.

python benchmarks/services/plain.py MODEL PORT
"""

from __future__ import annotations

import io
import sys

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, UploadFile
from PIL import Image

from vitrail.weights import open_run

app = FastAPI()
model, card = open_run(sys.argv[1])


@app.post("/predict")
def predict(image: UploadFile):
    picture = Image.open(io.BytesIO(image.file.read())).convert("RGB")
    pixels = card.preprocess(np.array(picture))
    with torch.inference_mode():
        probabilities = model(pixels[None]).softmax(dim=1)[0]
    best = probabilities.topk(5)
    labels = [card.classes[i] for i in best.indices.tolist()]
    return {"predictions": [{"labels": labels, "probabilities": best.values.tolist()}]}


@app.get("/ready")
def ready():
    return {}


uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
