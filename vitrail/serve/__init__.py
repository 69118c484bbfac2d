"""The HTTP service of `vitrail serve`.

A request passes through these modules:

| module | what it does |
|---|---|
| `guard` | API key, allowed hosts, security headers, the access log |
| `app` | the routes |
| `uploads` | the body, within its limits, to the bytes of each image |
| `decode` | the bytes of an image to the model's pixels; refuses what is not a raster image |
| `batcher` | a bounded queue, and one thread that computes batches |
| `models` | the models by name, and the swap to a new version |
| `maps` | attention and relevance, for `/explain` |
| `metrics` | counters of all worker processes, for Prometheus |
| `server` | uvicorn, its worker processes and their supervision |

An exported model is served without torch: only `maps` imports it, and only PyTorch models use `maps`.
"""
