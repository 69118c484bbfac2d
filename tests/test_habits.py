"""What people type who come from timm, ultralytics, Hugging Face, fastai and torchvision, and the answer they get."""

from __future__ import annotations

import re

import peers
import pytest

import vitrail
from vitrail import cli
from vitrail.config import habits, synonyms
from vitrail.errors import UserError
from vitrail.models import canonical
from vitrail.verbs import VERBS
from vitrail.weights import hub

# Flags that are called otherwise here: what is typed after `vitrail`, and the command in the answer.
RENAMED = {
    # timm
    "train photos --initial-checkpoint a.pth": "train photos --weights a.pth",
    "train photos --input-size 224": "train photos --img-size 224",
    "train photos --in-chans 1": "train photos --channels 1",
    "train photos --crop-pct 0.9": "train photos --crop 0.9",
    "train photos --torchcompile": "train photos --compile",
    "train photos --mixup-prob 0.5": "train photos --mix-prob 0.5",
    "train photos --model-ema-decay 0.999": "train photos --model-ema 0.999",
    "train photos --bce-loss": "train photos --loss bce",
    "train photos --scale 0.5": "train photos --crop-scale 0.5",
    "train photos --experiment one": "train photos --name one",
    "train photos --log-wandb": "train photos --log wandb",
    "train photos --eval-metric loss": "train photos --best loss",
    "train photos --train-interpolation bilinear": "train photos --interpolation bilinear",
    "train photos --finetune mae.pth": "train photos --weights mae.pth",
    "train photos --fine-tune mae.pth": "train photos --weights mae.pth",
    "train photos --teacher-path runs/a": "train photos --teacher runs/a",
    "train photos --distillation-type soft": "train photos --distill soft",
    "train photos --distillation-alpha 0.9": "train photos --distill-alpha 0.9",
    "train photos --patience-epochs 3": "train photos --patience 3",
    "predict r a.jpg --topk 3": "predict r a.jpg --top 3",
    "predict a.jpg --checkpoint r": "predict r a.jpg",
    "evaluate --checkpoint r photos": "evaluate r photos",
    "export --checkpoint r": "export r",
    # torchvision
    "train --data-path photos": "train photos",
    "train photos --label-smoothing 0.1": "train photos --smoothing 0.1",
    "train photos --mixup-alpha 0.8": "train photos --mixup 0.8",
    "train photos --cutmix-alpha 1": "train photos --cutmix 1",
    "train photos --lr-scheduler linear": "train photos --sched linear",
    "train photos --lr-warmup-epochs 5": "train photos --warmup-epochs 5",
    "train photos --ra-magnitude 7": "train photos --magnitude 7",
    "train photos --random-erase 0.25": "train photos --reprob 0.25",
    "train photos --train-crop-size 176": "train photos --img-size 176",
    "train photos --clip-grad-norm 1": "train photos --clip-grad 1",
    # Hugging Face
    "train photos --learning-rate 3e-4": "train photos --lr 3e-4",
    "train photos --learning_rate=3e-4": "train photos --lr 3e-4",
    "train photos --num-train-epochs 3": "train photos --epochs 3",
    "train photos --per-device-train-batch-size 8": "train photos --batch-size 8",
    "train photos --gradient-checkpointing": "train photos --grad-checkpointing",
    "train photos --lr-scheduler-type cosine": "train photos --sched cosine",
    "train photos --fp16": "train photos --amp fp16",
    "train photos --bf16": "train photos --amp bf16",
    "train photos --report-to wandb": "train photos --log wandb",
    "train photos --output-dir out": "train photos --out out",
    "train photos --overwrite-output-dir": "train photos --overwrite",
    "train --resume-from-checkpoint runs/a": "train --resume runs/a",
    "train --train-dir photos": "train photos",
    "train photos --train-val-split 0.1": "train photos --val-fraction 0.1",
    "train t.csv --image-column-name file": "train t.csv --image-column file",
    "train t.csv --label-column-name kind": "train t.csv --label-column kind",
    "train photos --label-smoothing-factor 0.1": "train photos --smoothing 0.1",
    "train photos --max-grad-norm 1": "train photos --clip-grad 1",
    "train photos --optim sgd": "train photos --opt sgd",
    "train photos --dataloader-num-workers 4": "train photos --workers 4",
    "train photos --run-name one": "train photos --name one",
    "train photos --metric-for-best-model f1": "train photos --best f1",
    "train photos --early-stopping-patience 5": "train photos --patience 5",
    "train photos --torch-compile": "train photos --compile",
    "train photos --use-cpu": "train photos --device cpu",
    "train photos --learning-rate 1 --fp16 --output-dir o": "train photos --lr 1 --amp fp16 --out o",
    "pretrain photos --learning-rate 1": "pretrain photos --lr 1",
    # ultralytics
    "train --data photos": "train photos",
    "train photos --batch 16": "train photos --batch-size 16",
    "train photos --lr0 0.01": "train photos --lr 0.01",
    "train photos --lrf 0.01": "train photos --min-lr 0.01",
    "train photos --project here": "train photos --out here",
    "train photos --exist-ok": "train photos --overwrite",
    "train photos --optimizer sgd": "train photos --opt sgd",
    "train photos --cos-lr": "train photos --sched cosine",
    "train photos --dropout 0.1": "train photos --drop 0.1",
    "train photos --fliplr 0.5": "train photos --hflip 0.5",
    "train photos --erasing 0.4": "train photos --reprob 0.4",
    "predict r --source a.jpg": "predict r a.jpg",
    "predict r a.jpg --conf 0.5": "predict r a.jpg --threshold 0.5",
    "predict r a.jpg --save-txt": "predict r a.jpg --format csv",
    "evaluate --weights r": "evaluate r",
    # fastai
    "train photos --valid-pct 0.1": "train photos --val-fraction 0.1",
    "train photos --bs 16": "train photos --batch-size 16",
    "train photos --lr-max 1e-3": "train photos --lr 1e-3",
    "train photos --base-lr 1e-3": "train photos --lr 1e-3",
    "train photos --n-epoch 3": "train photos --epochs 3",
    "train photos --arch vit_ti16": "train photos --model vit_ti16",
    "train t.csv --fn-col file": "train t.csv --image-column file",
    "train t.csv --folder images": "train t.csv --image-dir images",
}

# Flags without a counterpart, and what the answer says instead.
INSTEAD = {
    "train photos --pretrained": "--weights timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "train photos --num-classes 3": "The classes are counted in the data.",
    "train photos --nb-classes 3": "The classes are counted in the data.",
    "train photos --aa rand-m9": "--randaug 2 --magnitude 9",
    "train photos --checkpoint-hist 3": "A run keeps one epoch, chosen by --best",
    "train photos --lr-base 0.1": "never scaled by the batch size",
    "train photos --blr 1e-3": "never scaled by the batch size",
    "train photos --momentum 0.9": "fixed by --opt",
    "train photos --opt-betas 0.9 0.99": "fixed by --opt",
    "train photos --log-interval 50": "after every epoch",
    "train photos --wandb-project x": "WANDB_PROJECT",
    "train photos --warmup-ratio 0.1": "--warmup-epochs counts epochs",
    "train photos --warmup-steps 100": "--warmup-epochs counts epochs",
    "train photos --max-steps 100": "may be fractional",
    "train photos --model-name-or-path google/vit-base-patch16-224": "--weights hf:REPO",
    "train photos --dataset-name cats": "vitrail train hf:NAME",
    "train photos --ignore-mismatched-sizes": "automatic",
    "train photos --push-to-hub": "vitrail convert RUN FOLDER --to hf --push OWNER/NAME",
    "train photos --fsdp full": "use --shard full under torchrun",
    "train photos --world-size 2": "start the same command with torchrun",
    "train photos --deterministic": "bit-identical",
    "train photos --cache": "cached on disk by default",
    "train photos --time 1": "10m or 1h30m",
    "train photos --mosaic 1": "scaled and placed at random, by --crop-scale",
    "train photos --copy-paste 1": "scaled and placed at random, by --crop-scale",
    "train photos --flipud 0.5": "only horizontally",
    "train photos --test-only": "vitrail evaluate RUN",
    "train photos --freeze-epochs 1": "--body-lr",
    "train photos --pct-start 0.25": "--warmup-epochs counts epochs",
    "predict r a.jpg --iou 0.5": "Use --threshold",
    "predict r a.jpg --show": "--pictures FOLDER draws masks and boxes",
    "export r --dynamic": "Batch size, height and width are dynamic",
}

COMMANDS = {
    "val": "vitrail evaluate RUN",
    "validate": "vitrail evaluate RUN",
    "eval": "vitrail evaluate RUN",
    "test": "vitrail evaluate RUN --split test",
    "fit": "vitrail train DATA",
    "finetune": "vitrail train DATA --weights timm:",
    "fine_tune": "vitrail train DATA --weights timm:",
    "inference": "vitrail predict RUN IMAGES",
    "lr_find": "vitrail train DATA --find-lr",
    "list_models": "vitrail models",
    "push_to_hub": "vitrail convert RUN FOLDER --to hf --push OWNER/NAME",
    "distill": "vitrail train DATA --teacher RUN",
    "resume": "vitrail train --resume RUN",
    "help": "vitrail --help",
    "detect": "vitrail train DATA",
}

KEYWORDS = {
    "learning_rate": "It is called 'lr' here.",
    "num_train_epochs": "It is called 'epochs' here.",
    "fp16": "It is called 'amp' here: amp='fp16'.",
    "bs": "It is called 'batch_size' here.",
    "valid_pct": "It is called 'val_fraction' here.",
    "lr0": "It is called 'lr' here.",
    "output_dir": "It is called 'out' here.",
    "label_smoothing": "It is called 'smoothing' here.",
    "pretrained": "--weights timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "num_classes": "The classes are counted in the data.",
    "lrr": "Did you mean 'lr'?",
}


def says(capsys: pytest.CaptureFixture[str], typed: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(typed.split())
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert "Did you mean" not in err
    return err


def test_there_are_at_least_120_cases_of_five_tools():
    assert len(RENAMED) + len(INSTEAD) + len(COMMANDS) + len(KEYWORDS) >= 120
    used = {tool for rows in synonyms.FLAGS.values() for tools, _, _ in rows for tool in tools.split()}
    assert used == synonyms.TOOLS.keys()


@pytest.mark.parametrize(("typed", "command"), RENAMED.items())
def test_a_flag_that_is_called_otherwise_is_answered_with_the_command(capsys, typed, command):
    assert f"Use `vitrail {command}`." in says(capsys, typed)
    verb, *rest = command.split()
    cli.parse(verb, rest)  # and that command can be read


@pytest.mark.parametrize(("typed", "answer"), INSTEAD.items())
def test_a_flag_that_vitrail_does_not_have_is_answered_with_what_it_does(capsys, typed, answer):
    verb, flag = typed.split()[0], re.search(r"--[\w-]+", typed)[0]
    said = says(capsys, typed)
    assert f"`vitrail {verb}` has no option '{flag}'. " in said
    assert answer in said


@pytest.mark.parametrize(("typed", "answer"), COMMANDS.items())
def test_a_command_of_another_tool(capsys, typed, answer):
    said = says(capsys, f"{typed} photos")
    assert f"There is no command '{typed}'." in said
    assert answer in said


@pytest.mark.parametrize(("keyword", "answer"), KEYWORDS.items())
def test_a_keyword_of_another_tool(keyword, answer):
    with pytest.raises(UserError, match=f"There is no setting '{keyword}'") as caught:
        vitrail.train("digits", **{keyword: 1})
    assert answer in str(caught.value)


def test_settings_as_assignments_are_answered_with_flags(capsys):
    assert "`--epochs 10` instead of `epochs=10`" in says(capsys, "train photos epochs=10")
    assert "`photos` instead of `data=photos`" in says(capsys, "train data=photos epochs=10")
    assert "`--lr 0.1` instead of `lr0=0.1`" in says(capsys, "train photos lr0=0.1")
    assert cli.parse("train", ["photos", "--name", "lr=0.1"])["name"] == "lr=0.1"


def test_keywords_of_verbs_and_of_models():
    with pytest.raises(UserError, match=r"vitrail.predict has no keyword 'conf'. It is called 'threshold' here."):
        vitrail.predict("run", ["a.jpg"], conf=0.5)
    with pytest.raises(UserError, match=r"vitrail.evaluate has no keyword 'batch'. It is called 'batch_size' here."):
        vitrail.evaluate("run", batch=8)
    with pytest.raises(UserError, match=r"no option 'num_classes'. It is called 'classes' here."):
        vitrail.create("vit_ti16", num_classes=3)
    with pytest.raises(UserError, match=r"no option 'pretrained'. Trained weights are loaded by vitrail.load"):
        vitrail.create("vit_ti16", pretrained=True)
    with pytest.raises(AttributeError, match=r"no attribute 'create_model': use vitrail.create\(NAME\)"):
        vitrail.create_model("vit_tiny_patch16_224")
    assert not hasattr(vitrail, "no_such_name")


@pytest.mark.parametrize(
    ("name", "answer"), [("resnet50", "bit_r50x1"), ("yolov8n-cls.pt", "no YOLO"), ("convnext_tiny", "coatnet_0")]
)
def test_a_model_that_vitrail_does_not_have(name, answer):
    with pytest.raises(UserError, match=f"There is no model '{name}': .*{answer}"):
        vitrail.create(name)


def test_devices_and_precisions_as_others_write_them(capsys):
    assert "The device 'cuda:0' cannot be used" in says(capsys, "train digits --device 0")
    assert "A process uses one device, but --device is 0,1." in says(capsys, "train digits --device 0,1")
    assert cli.parse("train", ["digits", "--amp", "--epochs", "2"]) == {"data": "digits", "epochs": 2.0}
    assert cli.parse("train", ["--amp", "digits"]) == {"data": "digits"}
    assert cli.parse("train", ["digits", "--amp", "bf16"]) == {"data": "digits", "amp": "bf16"}
    assert "'--amp' must be one of" in _raised("train", "digits", "--amp", "fp61")
    said = says(capsys, "train --data-dir photos")  # timm's name of the data is the folder of built-in sets here
    assert "Use `vitrail train photos`." in said


def _raised(verb, *words):
    with pytest.raises(UserError) as caught:
        cli.parse(verb, words)
    return str(caught.value)


def test_only_what_is_really_near_is_offered(capsys):
    for flag in ("--streamed-up", "--hflop16", "--drop-data", "--lorry"):
        assert "lists them all" in says(capsys, f"train photos {flag}")
    assert "Did you mean '--epochs'?" in _raised("train", "photos", "--epoch", "3")


# The table itself


@pytest.mark.parametrize("verb", synonyms.FLAGS)
def test_no_synonym_is_an_option_itself_and_each_leads_to_one(verb):
    known = {name for argument in cli.arguments(verb) for name in argument.names}
    known |= {argument.name.upper() for argument in cli.arguments(verb) if argument.positional}
    every = {name for other in VERBS for argument in cli.arguments(other) for name in argument.names}
    for tools, theirs, here in synonyms.FLAGS[verb]:
        assert set(tools.split()) <= synonyms.TOOLS.keys(), theirs
        assert f"--{theirs}" not in known, theirs
        assert here.endswith(".") or here.split()[0] in known, theirs
        assert set(re.findall(r"--[a-z][\w-]*", here)) <= every, theirs


def test_commands_and_names_in_the_table_exist():
    for _, theirs, here in synonyms.VERBS:
        assert theirs not in VERBS
        assert here.startswith(("vitrail ", "--")) or here.split()[0] in VERBS, theirs
    for _, theirs, here in synonyms.NAMES:
        assert theirs not in vitrail.__all__
        assert hasattr(vitrail, re.match(r"vitrail\.(\w+)", here)[1]), theirs
    for _, _, says_so in synonyms.MODELS:
        for name in re.findall(r"\b(?:vit|bit|coatnet|pvt|swin|dinov2)_\w+", says_so):
            canonical(name)


def test_names_of_timm_are_weights_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    full = "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert full == synonyms.PRETRAINED
    for name in ("vit_tiny_patch16_224", "timm:vit_tiny_patch16_224", full, full.removeprefix("timm:")):
        assert hub.is_hub(name)
        assert hub.full_name(name) == full
    assert hub.full_name("hf:google/vit-base-patch16-224") == "hf:google/vit-base-patch16-224"
    assert not hub.is_hub("runs/photos")
    (tmp_path / "vit_tiny_patch16_224").mkdir()  # a run of this name comes first
    assert not hub.is_hub("vit_tiny_patch16_224")


def test_tags_are_those_that_timm_chooses():
    peers._torchvision()
    from timm.models import get_pretrained_cfg, list_models

    checked = 0
    for name in list_models():
        config = get_pretrained_cfg(name)
        if config is not None and config.has_weights and habits.timm_tag(name) is not None:
            assert habits.timm_tag(name) == config.tag, name
            checked += 1
    assert checked >= 60
