"""What timm, ultralytics, Hugging Face, fastai and torchvision call things, and what vitrail calls them.

Data only; `habits.py` reads it. A row of a table is (tools, their name, the answer). The answer is a flag of vitrail,
with a value if it needs one, an argument in capitals, or a sentence, with a full stop, on what vitrail does instead.
"""

from __future__ import annotations

from vitrail.config.train_synonyms import PRETRAINED as PRETRAINED
from vitrail.config.train_synonyms import TRAIN
from vitrail.config.train_synonyms import Rows as Rows

TOOLS = {
    "timm": "timm",
    "ul": "ultralytics",
    "hf": "Hugging Face",
    "fastai": "fastai",
    "tv": "torchvision",
}

# The tag of timm's weights for a name without one: the first pattern that matches the whole name.
TIMM_TAGS = (
    (r"deit3?_.*", "fb_in1k"),
    (r"mixer_[bl]16_224", "goog_in21k_ft_in1k"),
    (r"pvt_v2_b\d(_li)?", "in1k"),
    (r"resnetv2_50x1_bit", "goog_distilled_in1k"),
    (r"resnetv2_152x2_bit", "goog_teacher_in21k_ft_in1k"),
    (r"resnetv2_\d+x\d_bit", "goog_in21k_ft_in1k"),
    (r"swin_tiny_patch4_window7_224", "ms_in1k"),
    (r"swin_\w+_patch4_window\d+_\d+", "ms_in22k_ft_in1k"),
    (r"swinv2_\w+_window12_192", "ms_in22k"),
    (r"swinv2_\w+_window12to\d+_192to\d+", "ms_in22k_ft_in1k"),
    (r"swinv2_(?!cr_)\w+", "ms_in1k"),
    (r"vit_\w+_dinov2", "lvd142m"),
    (r"vit_base_patch(8|16)_224", "augreg2_in21k_ft_in1k"),
    (r"vit_small_patch8_224", "dino"),
    (r"vit_(base_r50_s16|huge_patch14|large_patch32)_224", "orig_in21k"),
    (r"vit_(base_r50_s16|large_patch32)_384", "orig_in21k_ft_in1k"),
    (r"vit_(tiny|small|base|large)_(patch(16|32)|r\d*_s(16|32)(_p8)?)_(224|384)", "augreg_in21k_ft_in1k"),
)

_NMS = "Overlapping boxes are removed by the model's own rule. Use --threshold for fewer or more of them."

FLAGS: dict[str, Rows] = {
    "train": TRAIN,  # also for `pretrain`, as far as it has the option
    "evaluate": (
        ("timm", "checkpoint", "RUN"),
        ("ul tv", "weights", "RUN"),
        ("ul", "model", "RUN"),
        ("tv hf", "data-path", "DATA"),
        ("ul", "data", "DATA"),
        ("hf", "per-device-eval-batch-size", "--batch-size"),
        ("ul", "batch", "--batch-size"),
        ("timm", "results-file", "metrics.json and the tables are written to --out."),
        ("timm", "use-ema", "A run saves its moving average, if it has one: that is evaluated."),
        ("timm", "tta", "Every image is predicted once. Try another --img-size."),
        ("timm", "num-classes", "The classes are those of the model."),
        ("hf", "output-dir", "--out"),
        ("ul", "save-json", "metrics.json is written to --out; --json prints it."),
        ("ul", "plots", "Figures are always written to --out."),
        ("ul", "iou", "Boxes are measured at all of COCO's overlaps, 0.5 to 0.95."),
        ("ul", "conf", "Metrics use the thresholds of the model. See predict --threshold."),
        ("timm", "amp", "On a CPU choose --engine; bf16 where it is faster."),
    ),
    # Also for `embed` and `explain`, as far as they have the option.
    "predict": (
        ("ul", "source", "IMAGES"),
        ("ul", "json", "--format json"),
        ("ul", "confidence", "--threshold"),
        ("hf", "score-threshold", "--threshold"),
        ("timm", "data-dir", "IMAGES"),
        ("timm", "checkpoint", "RUN"),
        ("ul tv", "weights", "RUN"),
        ("ul", "model", "RUN"),
        ("ul", "conf", "--threshold"),
        ("timm", "topk", "--top"),
        ("hf", "top-k", "--top"),
        ("ul", "batch", "--batch-size"),
        ("ul", "project", "--out"),
        ("ul", "save-dir", "--out"),
        ("timm hf", "output-dir", "--out"),
        ("timm", "results-file", "--out"),
        ("timm", "results-format", "--format"),
        ("timm", "output-type", "--format"),
        ("ul", "save-txt", "--format csv"),
        ("ul", "save-conf", "Every answer has its probability."),
        ("ul", "save", "--out FILE writes the predictions to a file."),
        ("ul", "show", "--pictures FOLDER draws masks and boxes; `vitrail explain` shows where a model looks."),
        ("ul", "stream", "Predictions are always returned one by one."),
        ("ul", "iou", _NMS),
        ("ul", "max-det", _NMS),
        ("ul", "augment", "Every image is predicted once."),
        ("ul", "half", "On a CPU choose --engine; bf16 where it is faster."),
        ("timm", "label-type", "Labels are the class names that travel with the model."),
        ("timm", "num-classes", "The classes are those of the model."),
    ),
    "serve": (
        ("tv", "bind", "--host"),
        ("tv", "address", "--host"),
        ("tv", "listen", "--host"),
        ("tv", "batch-size", "--max-batch"),
        ("tv", "num-workers", "--workers"),
        ("tv", "cors", "CORS is off: requests of other sites are refused. Put a proxy in front of the service."),
    ),
    "export": (
        ("ul", "weights", "RUN"),
        ("ul timm", "model", "RUN"),
        ("timm", "checkpoint", "RUN"),
        ("timm", "dynamic-size", "Batch size, height and width are dynamic; --no-preprocess fixes the size."),
        ("ul", "dynamic", "Batch size, height and width are dynamic; --no-preprocess fixes the size."),
        ("ul timm", "opset", "The opset is fixed; the export prints it."),
        ("ul", "simplify", "The graph is written as small as it can be."),
        ("ul", "half", "Files are float32, or int8 with --int8."),
        ("timm", "fp16", "Files are float32, or int8 with --int8."),
        ("hf", "quantize", "--int8"),
        ("ul", "imgsz", "The image size is that of the model; files resize images of any size themselves."),
        ("ul", "nms", "Non-maximum suppression is always in the graph of box models."),
        ("ul", "keras", "ONNX files run in ONNX Runtime, OpenVINO and TensorRT."),
    ),
}

# Commands of other tools, and what to type.
VERBS: Rows = (
    ("ul", "val", "evaluate RUN"),
    ("timm", "validate", "evaluate RUN"),
    ("hf tv", "eval", "evaluate RUN"),
    ("tv", "test", "evaluate RUN --split test"),
    ("fastai", "fit", "train DATA"),
    ("fastai", "fit-one-cycle", "train DATA"),
    ("hf", "finetune", f"train DATA --weights {PRETRAINED}"),
    ("fastai", "fine-tune", f"train DATA --weights {PRETRAINED}"),
    ("timm hf", "inference", "predict RUN IMAGES"),
    ("timm", "infer", "predict RUN IMAGES"),
    ("ul", "classify", "train DATA or vitrail predict RUN IMAGES"),
    ("fastai", "lr-find", "train DATA --find-lr"),
    ("fastai", "find-lr", "train DATA --find-lr"),
    ("fastai", "show-batch", "check DATA"),
    ("ul", "checks", "check DATA"),
    ("fastai", "interpret", "report RUN"),
    ("timm", "list-models", "models"),
    ("hf", "push-to-hub", "convert RUN FOLDER --to hf --push OWNER/NAME"),
    ("hf", "upload", "convert RUN FOLDER --to hf --push OWNER/NAME"),
    ("hf", "download", "convert hf:REPO FILE"),
    ("timm", "onnx-export", "export RUN"),
    ("timm", "avg-checkpoints", "train DATA --model-ema 0.999"),
    ("timm", "distill", "train DATA --teacher RUN"),
    ("ul", "cfg", "recipes"),
    ("ul", "resume", "train --resume RUN"),
    ("hf", "feature-extraction", "embed RUN IMAGES --out FILE"),
    ("ul", "help", "--help"),
    ("ul", "version", "--version"),
    ("ul", "detect", "train DATA or vitrail predict RUN IMAGES"),
    ("ul", "segment", "train DATA or vitrail predict RUN IMAGES"),
    ("ul", "tune", "train DATA --find-lr"),
    ("ul", "benchmark", "export RUN"),
    ("ul", "track", "vitrail classifies single images; it has no video."),
)

# Names that people import, and vitrail's.
NAMES: Rows = (
    ("timm", "create_model", "vitrail.create(NAME), or vitrail.load('timm:NAME') with trained weights"),
    ("timm tv", "list_models", "vitrail.models()"),
    ("tv", "get_model", "vitrail.create(NAME), or vitrail.load('timm:NAME') with trained weights"),
    ("hf", "from_pretrained", "vitrail.load('hf:REPO')"),
    ("hf", "AutoModelForImageClassification", "vitrail.load('hf:REPO')"),
    ("hf", "pipeline", "vitrail.Predictor(RUN)"),
    ("hf", "Trainer", "vitrail.train(DATA, …)"),
    ("hf", "TrainingArguments", "vitrail.train(DATA, …), which takes them as keywords"),
    ("fastai", "vision_learner", "vitrail.train(DATA, weights='timm:NAME')"),
    ("fastai", "load_learner", "vitrail.Predictor(RUN)"),
    ("fastai", "ImageDataLoaders", "vitrail.train(DATA), which reads folders and tables itself"),
    ("ul", "YOLO", "vitrail.Predictor(RUN)"),
    ("ul", "val", "vitrail.evaluate(RUN)"),
    ("fastai", "fit", "vitrail.train(DATA)"),
    ("fastai", "fine_tune", "vitrail.train(DATA, weights='timm:NAME')"),
    ("hf", "push_to_hub", "vitrail.convert(RUN, FOLDER, to='hf', push='OWNER/NAME')"),
)

# Keywords of functions that make a model.
MODEL_OPTIONS: Rows = (
    ("timm", "pretrained", "Trained weights are loaded by vitrail.load('timm:NAME', classes=…)."),
    ("tv", "weights", "Trained weights are loaded by vitrail.load('timm:NAME', classes=…)."),
    ("timm tv", "num_classes", "classes"),
    ("hf", "num_labels", "classes"),
    ("timm", "in_chans", "channels"),
    ("hf", "num_channels", "channels"),
    ("hf tv", "image_size", "img_size"),
    ("timm", "drop_rate", "drop"),
    ("tv", "dropout", "drop"),
    ("hf", "hidden_dropout_prob", "drop"),
    ("timm", "drop_path_rate", "drop_path"),
    ("timm", "global_pool", "pool"),
    ("timm", "embed_dim", "width"),
    ("hf", "hidden_size", "width"),
    ("tv", "hidden_dim", "width"),
    ("hf", "num_hidden_layers", "depth"),
    ("tv", "num_layers", "depth"),
    ("timm tv", "num_heads", "heads"),
    ("hf", "num_attention_heads", "heads"),
    ("hf", "intermediate_size", "mlp"),
    ("tv", "mlp_dim", "mlp"),
    ("timm tv hf", "patch_size", "patch"),
    ("timm", "reg_tokens", "registers"),
    ("timm", "init_values", "layer_scale"),
)

# Beginnings of model names that vitrail does not have.
MODELS: Rows = (
    ("ul", "yolo", "vitrail has no YOLO; `vitrail models` lists its classifiers, such as vit_ti16."),
    ("timm tv fastai", "resnet", "vitrail has no plain ResNet; its ResNets are BiT's: bit_r50x1."),
    ("timm tv", "resnext", "vitrail has no ResNeXt; its ResNets are BiT's: bit_r50x1."),
    ("timm tv", "wide_resnet", "vitrail has no plain ResNet; its ResNets are BiT's: bit_r50x3."),
    ("timm tv", "efficientnet", "vitrail has no EfficientNet; small and mixed with convolutions is coatnet_0."),
    ("timm tv", "mobilenet", "vitrail has no MobileNet; its smallest models are vit_nano16 and pvt_v2_b0."),
    ("timm tv", "convnext", "vitrail has no ConvNeXt; mixed with convolutions are coatnet_0 and pvt_v2_b2."),
    ("tv", "maxvit", "vitrail has no MaxViT; mixed with convolutions are coatnet_0 and pvt_v2_b2."),
    ("timm", "beit", "vitrail has no BEiT; self-supervised weights are dinov2_s14 and those of `vitrail pretrain`."),
    ("timm", "eva", "vitrail has no EVA; self-supervised weights are dinov2_s14 and those of `vitrail pretrain`."),
    ("timm tv", "vgg", "vitrail has no VGG; a ResNet of its size is bit_r50x1."),
    ("timm tv", "densenet", "vitrail has no DenseNet; a ResNet of its size is bit_r50x1."),
    ("timm tv", "regnet", "vitrail has no RegNet; a ResNet of its size is bit_r50x1."),
)
