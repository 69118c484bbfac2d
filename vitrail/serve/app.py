"""The routes."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from vitrail.errors import UserError, nearest
from vitrail.runs.words import classify_by, label_names
from vitrail.serve import page, schema
from vitrail.serve.errors import ApiError
from vitrail.serve.guard import Guard
from vitrail.serve.metrics import TYPE, Shared
from vitrail.serve.models import Version
from vitrail.serve.service import Gone, Service
from vitrail.serve.settings import Settings
from vitrail.tasks.task import Answer
from vitrail.version import VERSION

Name = Annotated[str | None, Query(description="name of the model; the first one by default")]
Labels = Annotated[
    str | None, Query(max_length=4000, description="words to choose from, of a model trained on captions: cat,dog")
]
ROW_AND_COLUMN = r"^\d{1,4},\d{1,4}$"


def create_app(settings: Settings, shared: Shared) -> ASGIApp:
    """The service as an ASGI application. uvicorn calls it in every worker process."""
    service = Service(settings, shared)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="vitrail",
        version=VERSION,
        description="Predictions, explanations and feature vectors of images.",
        docs_url=None,  # FastAPI's page loads from a CDN; ours is in `assets/`
        redoc_url=None,
        lifespan=life,
    )
    app.state.service = service
    app.include_router(page.router)
    app.include_router(_routes(settings.max_images))
    for kind, respond in _ERRORS.items():
        app.add_exception_handler(kind, respond)
    return Guard(app, settings, service.metrics.request)


def _routes(max_images: int) -> APIRouter:
    router = APIRouter()
    body = schema.images_body(max_images)
    known_only = [Depends(_check_parameters)]
    post: Callable[..., Any] = partial(router.post, responses=schema.IMAGE_ERRORS, dependencies=known_only)
    one = schema.images_body(1)
    pictures: dict[int | str, dict[str, Any]] = {200: {"content": {"image/png": {}, "application/octet-stream": {}}}}
    post("/predict", response_model=schema.Predictions, openapi_extra=body)(predict)
    post("/embed", response_model=schema.Embeddings, openapi_extra=body)(embed)
    post(
        "/explain",
        response_model=schema.Explanation,
        openapi_extra=one,
        responses={**schema.IMAGE_ERRORS, **pictures},
    )(explain)
    router.get("/model", response_model=schema.ModelFacts, responses=schema.errors(404, 422), dependencies=known_only)(
        model_facts
    )
    router.get("/models", response_model=schema.ModelList, responses=schema.errors())(model_list)
    router.get("/health", response_model=schema.State, responses=schema.errors(503))(health)
    router.get("/ready", response_model=schema.State, responses=schema.errors(503))(ready)
    router.get("/metrics", response_class=PlainTextResponse, responses=schema.errors())(metrics)
    return router


async def _check_parameters(request: Request) -> None:
    """Raises ApiError for parameters that a route does not have: a misspelled one would be ignored."""
    known = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    for name in (name[:100] for name in request.query_params if name not in known):
        hint = nearest(name, known) or f" The parameters are {', '.join(known)}."
        raise ApiError(422, "bad_parameter", f"There is no parameter '{name}'.{hint}")


async def predict(
    request: Request,
    model: Name = None,
    top: Annotated[int | None, Query(ge=1, le=100_000, description="most labels per image")] = None,
    scores: Annotated[bool, Query(description="also all probabilities, values or shares of the area")] = False,
    layer: Annotated[bool, Query(description="also the mask or boxes as a transparent PNG over the image")] = False,
    threshold: Annotated[
        float | None, Query(ge=0, le=1, description="smallest probability; by default, the model's")
    ] = None,
    labels: Labels = None,
) -> Response:
    """Predict the classes, labels, values, masks or boxes of images."""
    service, version = _find(request, model)
    if threshold is not None and version.predictor.card.task.meant == "values":
        raise ApiError(422, "not_supported", "A threshold needs probabilities, but the model predicts values.")
    names, predictions = _names(version, labels), []
    async with service.accept(request) as accepted:
        outputs = await accepted.compute(version, "outputs")
        task = version.predictor.card.task
        if names:
            task, logits = await service.read_in_thread(task.by_words, np.stack(outputs), names)
            meant, outputs = task.means(logits), list(logits)
            answers = task.answers(meant, top) if threshold is None else task.answers_above(meant, threshold, top)
        else:
            try:
                answers = await accepted.answers(version, outputs, top, threshold)
            except UserError as error:
                raise ApiError(422, "not_supported", str(error)) from error
        for upload, row, answer in zip(accepted.uploads, outputs, answers, strict=True):
            found: dict[str, Any] = {} if upload.name is None else {"file": upload.name}
            found |= answer.to_json()
            if scores:
                found["scores"] = answer.scores() if task.annotated else task.means(row[None])[0].tolist()
            if layer and (picture := await service.read_in_thread(_png, answer)) is not None:
                found["layer"] = picture
            predictions.append(found)
    content = {"model": version.name, "version": version.id, "predictions": predictions}
    if names and (cut := version.predictor.card.task.words().cut(names)):
        content["cut"] = cut
    return JSONResponse(content)


def _png(answer: Answer) -> str | None:
    """The picture of an answer as base64; None if it has none."""
    picture = answer.layer()
    if picture is None:
        return None
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


async def embed(request: Request, model: Name = None) -> Response:
    """Compute the feature vectors of images."""
    service, version = _find(request, model)
    if not version.embeds:
        raise ApiError(422, "not_supported", "An exported file has no feature vectors. Serve the run it came from.")
    async with service.accept(request) as accepted:
        rows = await accepted.compute(version, "features")
    return JSONResponse({"model": version.name, "version": version.id, "embeddings": [row.tolist() for row in rows]})


async def explain(
    request: Request,
    model: Name = None,
    method: Annotated[Literal["attention", "relevance"], Query(description="attention, or evidence for an answer")] = (
        "attention"
    ),
    target: Annotated[str | None, Query(description="what to explain; by default, the predicted class")] = None,
    labels: Labels = None,
    layer: Annotated[int | None, Query(description="attention of this layer, from 1")] = None,
    head: Annotated[int | None, Query(description="of this head, from 1; by default, their mean")] = None,
    patch: Annotated[
        str | None, Query(pattern=ROW_AND_COLUMN, description="attention of this patch, as ROW,COLUMN from 0")
    ] = None,
    format: Annotated[
        Literal["json", "png", "binary"],
        Query(description="numbers, a picture, or the attention of all layers, heads and patches"),
    ] = "json",
) -> Response:
    """Explain the answer for an image, by attention or by relevance.

    Attention is by default the rollout through all layers; with `head` or `patch`, that of the last layer.
    """
    service, version = _find(request, model)
    if not version.explains:
        raise ApiError(422, "not_supported", "An exported file cannot be explained. Serve the run it came from.")
    if format == "binary" and method != "attention":
        raise ApiError(422, "not_supported", "format=binary is for method=attention.")
    given = {"target": target, "labels": labels, "layer": layer, "head": head, "patch": patch}
    used = () if format == "binary" else ("target", "labels") if method == "relevance" else ("layer", "head", "patch")
    for name, value in given.items():
        if value is not None and name not in used:
            kind = "format=binary" if format == "binary" else f"method={method}"
            raise ApiError(422, "not_supported", f"'{name}' does not apply to {kind}. Leave it out.")
    from vitrail.serve import maps

    predictor = version.predictor
    async with service.accept(request) as accepted:
        if format == "binary":
            content = await accepted.compute_one(version, partial(maps.everything, predictor))
            return Response(content, media_type="application/octet-stream")
        if method == "relevance":
            names = _names(version, labels)
            chosen = await service.read_in_thread(classify_by, predictor, names) if names else predictor
            work = partial(maps.class_relevance, chosen, target=target)
        else:
            row, _, column = (patch or "").partition(",")
            place = (int(row), int(column)) if patch else None
            work = partial(maps.attention, predictor, layer=layer, head=head, patch=place)
        if format == "png":
            picture = await accepted.compute_one(version, lambda pixels: maps.png(pixels, work(pixels)))
            return Response(picture, media_type="image/png")
        found = await accepted.compute_one(version, work)
    return JSONResponse(
        {
            "model": version.name,
            "version": version.id,
            "method": method,
            "target": found.target,
            "signed": found.signed,
            "map": found.values.tolist(),
        }
    )


async def model_facts(request: Request, model: Name = None) -> Response:
    """Describe a model."""
    _, version = _find(request, model)
    card = version.predictor.card
    return JSONResponse(
        {
            "name": version.name,
            "version": version.id,
            "architecture": card.model,
            "size": version.predictor.size,
            "engine": version.predictor.engine,
            "task": card.task.to_json(),
            "form": card.task.answer.form,
            "preprocess": dataclasses.asdict(card.preprocess),
            "metrics": {name: value for name, value in card.metrics.items() if isinstance(value, int | float)},
            "explains": version.facts,
            "embeds": version.embeds,
            "words": card.task.several,
        }
    )


async def model_list(request: Request) -> Response:
    """List the models by name."""
    names = list(_service(request).models.current)
    return JSONResponse({"models": names, "default": names[0]})


async def health(request: Request) -> Response:
    """Whether the process works; if not, restart it."""
    alive = _service(request).batcher.alive
    return JSONResponse({"status": "ok" if alive else "broken"}, 200 if alive else 503)


async def ready(request: Request) -> Response:
    """Whether the service takes requests now."""
    service = _service(request)
    return JSONResponse({"status": "ready" if service.ready else "busy"}, 200 if service.ready else 503)


async def metrics(request: Request) -> Response:
    """The metrics of all workers, for Prometheus."""
    service = _service(request)
    return Response(service.metrics.text(service.models.versions()), media_type=TYPE)


def _names(version: Version, labels: str | None) -> tuple[str, ...]:
    """The words to choose from, which a model that was trained on captions needs, and no other takes."""
    if labels is None and not version.predictor.card.task.several:
        return ()
    try:
        version.predictor.card.task.words()
        return label_names(labels or "")
    except UserError as error:
        raise ApiError(422, "bad_labels", str(error)) from error


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _find(request: Request, name: str | None) -> tuple[Service, Version]:
    service = _service(request)
    return service, service.models.get(name)


# Errors, all as the JSON of `ApiError`


async def _refused(_: Request, error: Any) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _invalid(_: Request, error: Any) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    return ApiError(422, "bad_parameter", f"'{where}': {first['msg']}.").response()


async def _not_found(_: Request, error: Any) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return ApiError(error.status_code, code, f"{error.detail}.", headers=error.headers).response()


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody receives it


async def _broken(_: Request, __: Exception) -> Response:
    return ApiError(500, "internal", "The service failed. Its log has the reason.").response()


_ERRORS: dict[type[Exception], Callable[..., Any]] = {
    ApiError: _refused,
    RequestValidationError: _invalid,
    HTTPException: _not_found,
    Gone: _gone,
    ClientDisconnect: _gone,
    Exception: _broken,
}
