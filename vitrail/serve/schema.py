"""What the service sends and accepts, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class Prediction(BaseModel):
    """The answer for one image."""

    file: str | None = Field(None, description="name of the file, if the client sent one")
    labels: list[str] | None = Field(None, description="classes or labels, best first")
    probabilities: list[float] | None = Field(None, description="their probabilities")
    boxes: list[list[float]] | None = Field(None, description="x0, y0, x1, y1 of each label, in pixels of the image")
    values: dict[str, float] | None = Field(None, description="numbers by name, of a regression")
    size: list[int] | None = Field(None, description="height and width of the image, of a model of masks")
    pixels: dict[str, int] | None = Field(None, description="pixels of each class, of a model of masks")
    scores: list[float] | None = Field(
        None, description="all probabilities, values or shares of the area in class order, with scores=true"
    )
    layer: str | None = Field(None, description="a transparent PNG to lay over the image, base64, with layer=true")


class Predictions(BaseModel):
    model: str
    version: str = Field(description="changes whenever the answers may")
    predictions: list[Prediction]
    cut: int | None = Field(None, description="labels that are longer than the model reads, whose end is ignored")


class Embeddings(BaseModel):
    model: str
    version: str
    embeddings: list[list[float]] = Field(description="one feature vector per image")


class Explanation(BaseModel):
    model: str
    version: str
    method: str
    target: str | None = Field(None, description="the class, label or value that the relevance is for")
    signed: bool = Field(description="whether negative numbers are evidence against")
    map: list[list[float]] = Field(description="one number per patch, by row")


class Layer(BaseModel):
    grid: tuple[int, int] = Field(description="rows and columns of patches")
    heads: int


class Explains(BaseModel):
    relevance: bool
    signed: bool
    layers: list[Layer] = Field(description="the attention layers; none for a model without attention")


class ModelFacts(BaseModel):
    name: str
    version: str
    architecture: str
    size: str = Field(description="parameters, or the size of the file")
    engine: str
    task: dict[str, Any] = Field(description="the task with its classes and constants")
    form: str = Field(description="probabilities of one class, labels, values, boxes or areas: how to show an answer")
    preprocess: dict[str, Any]
    metrics: dict[str, float]
    explains: Explains | None = Field(description="null for a file of another runtime")
    embeds: bool
    words: bool = Field(description="whether it was trained on captions, so that it needs `labels` to choose from")


class ModelList(BaseModel):
    models: list[str]
    default: str


class State(BaseModel):
    status: str


class ErrorFacts(BaseModel):
    code: str = Field(description="for programs")
    message: str = Field(description="for people")
    image: int | None = Field(None, description="the image it is about, counted from 1, if there are several")


class Error(BaseModel):
    error: ErrorFacts


_WHY = {
    400: "The body cannot be parsed.",
    401: "The API key is missing or wrong.",
    403: "Another web site asks.",
    404: "There is no such model or address.",
    408: "The body was not received in time.",
    413: "The body, an image or the number of images is too large.",
    415: "The body or an image has a type that is not accepted.",
    421: "The service answers to localhost only.",
    422: "A parameter is invalid, or an image is damaged.",
    503: "The queue is full, or the answer would be late. `Retry-After` says when to try again.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, with those that every route has."""
    return {status: {"model": Error, "description": _WHY[status]} for status in sorted({*statuses, 401, 403, 421})}


IMAGE_ERRORS = errors(400, 404, 408, 413, 415, 422, 503)

_FILE = {"type": "string", "format": "binary"}


def images_body(most: int) -> dict[str, Any]:
    """The request body of routes that take images."""
    many = {
        "type": "object",
        "properties": {"images": {"type": "array", "items": _FILE, "minItems": 1, "maxItems": most}},
        "required": ["images"],
    }
    encoded = {
        "type": "object",
        "properties": {
            "images": {
                "type": "array",
                "items": {"type": "string", "contentEncoding": "base64"},
                "minItems": 1,
                "maxItems": most,
            }
        },
        "required": ["images"],
        "additionalProperties": False,
    }
    return {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {"schema": many},
                "application/json": {"schema": encoded},
                "image/*": {"schema": _FILE},
            },
        }
    }
