"""Names of the zoo's networks, as tables of published runs spell them. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Networks by the module of this package that builds them.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "resnet": (
        "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide-resnet50-2", "wide-resnet101-2", "resnext50-32x4d",
        "resnext101-32x4d", "resnext101-32x8d", "resnext101-64x4d", "se-resnet50", "se-resnext50-32x4d", "se-resnext101-32x4d",
    ),
    "efficientnet": (*(f"efficientnet-b{i}" for i in range(8)), "efficientnet-widese-b0", "efficientnet-widese-b4", "efficientnet-v2-s", "efficientnet-v2-m"),
    "ssd": ("ssd300",),
    "t5": (
        "t5-220m", "t5-3b", "t5-11b", "t5-23b", "t5-41b", "mt5-170m", "mt5-390m", "mt5-3b", "mt5-11b", "mt5-23b",
    ),
    "transformer_xl": ("transformer-xl-base", "transformer-xl-large"),
    "gnmt": ("gnmt",),
    "ncf": ("ncf",),
    "convnets": ("vgg16", "mobilenet-v2", "mobilenet-v3-large", "densenet121"),
    "vit": ("vit-tiny-16", "vit-small-16", "vit-base-16", "vit-large-16", "vit-base-32", "vit-large-32", "vit-huge-14"),
    "swin": ("swin-tiny", "swin-small", "swin-base", "swin-large"),
    "convnext": ("convnext-tiny", "convnext-small", "convnext-base", "convnext-large"),
    "speech": ("jasper-10x5", "quartznet-15x5"),
    "unet": ("unet", "nnunet-2d", "nnunet-3d"),
    "vnet": ("vnet", "unet-industrial"),
    "transformer_big": ("transformer-big",),
    "clip": ("clip-vit-base-32",),
    "inception": ("inception-v3",),
    "mask_rcnn": ("mask-rcnn",),
    "waveglow": ("waveglow",),
    "diffusion": ("stable-diffusion-1.5", "stable-diffusion-xl"),
    "recommenders": ("dlrm", "wide-and-deep", "vae-cf"),
    "speech_synthesis": ("fastpitch", "hifi-gan"),
    "tacotron": ("tacotron-2",),
    "wav2vec2": ("wav2vec2-base", "wav2vec2-large"),
    "tft": ("tft",),
    "bart": ("bart-base", "bart-large"),
    "encoders": (
        "albert-base", "albert-large", "albert-xlarge", "albert-xxlarge", "electra-small", "electra-base", "electra-large",
    ),
    "t5_text": ("t5-small", "t5-base", "t5-large", *(f"flan-t5-{size}" for size in ("small", "base", "large", "xl", "xxl"))),
    "whisper": tuple(f"whisper-{size}" for size in ("tiny", "base", "small", "medium", "large")),
}  # fmt: skip
_SIZES = {"tiny": "t", "small": "s", "base": "b", "large": "l"}
#: Other spellings, plain.
_ALIASES: Mapping[str, str] = {
    **{f"efficientnetv1b{i}": f"efficientnet-b{i}" for i in range(8)},
    **{f"rn{n}": f"resnet{n}" for n in (18, 34, 50, 101, 152)},
    **{f"{kind}{size}{end}": f"vit-{word}-16" for kind in ("vit", "deit") for word, letter in _SIZES.items() for size in (word, letter)
       for end in ("", "16", "patch16")},
    **{f"swin{size}{end}": f"swin-{word}" for word in _SIZES if word in ("tiny", "small", "base", "large") for size in (word, word[0]) for end in ("", "patch4window7")},
    **{f"convnext{word[0]}": f"convnext-{word}" for word in ("tiny", "small", "base", "large")},
    **{f"vit{size}{end}{patch}": f"vit-{word}-{patch}" for word, patch in (("base", 32), ("large", 32), ("huge", 14)) for size in (word, word[0])
       for end in ("", "patch")},
    **{f"albert{size}v{i}": f"albert-{size}" for size in ("base", "large", "xlarge", "xxlarge") for i in (1, 2)},
    **{f"whisperlargev{i}": "whisper-large" for i in (1, 2, 3)},
    "resnext101": "resnext101-32x4d", "resnext50": "resnext50-32x4d", "seresnext101": "se-resnext101-32x4d", "ssd": "ssd300",
    "ssdresnet50": "ssd300", "ssd300resnet50": "ssd300", "ssd300v11": "ssd300", "gnmtv2": "gnmt", "neumf": "ncf",
    "transformerxl": "transformer-xl-base", "mobilenetv3": "mobilenet-v3-large", "inception": "inception-v3",
    "densenet": "densenet121", "vgg": "vgg16", "jasper": "jasper-10x5", "quartznet": "quartznet-15x5", "nnunet": "nnunet-3d", "unetmedical": "unet",
    "wideresnet50": "wide-resnet50-2", "wideresnet101": "wide-resnet101-2", "seresnext50": "se-resnext50-32x4d",
    "unet2d": "unet", "unet3d": "nnunet-3d", "3dunet": "nnunet-3d", "unet3dmedical": "nnunet-3d", "unetindus": "unet-industrial",
    "dlrmsmall": "dlrm", "dlrmlarge": "dlrm", "widedeep": "wide-and-deep", "widendeep": "wide-and-deep", "vae": "vae-cf", "vaecollaborativefiltering": "vae-cf",
    "temporalfusiontransformer": "tft", "tacotron": "tacotron-2", "fastpitch10": "fastpitch", "fastpitch11": "fastpitch", "hifiganv1": "hifi-gan",
    "wav2vec2": "wav2vec2-base", "wav2vec20": "wav2vec2-base", "wav2vec20base": "wav2vec2-base", "wav2vec20large": "wav2vec2-large",
    "bart": "bart-large", "bartlargecnn": "bart-large", "electra": "electra-base", "electrabasediscriminator": "electra-base", "albert": "albert-base",
    "transformer": "transformer-big", "transformerwmt": "transformer-big",
    "maskrcnnr50fpn": "mask-rcnn", "maskrcnnresnet50fpn": "mask-rcnn",
    "clip": "clip-vit-base-32", "clipvitb32": "clip-vit-base-32", "clipvitbasepatch32": "clip-vit-base-32", "sdxl": "stable-diffusion-xl", "stablediffusionxlbase10": "stable-diffusion-xl",
    "sd": "stable-diffusion-1.5", "sd15": "stable-diffusion-1.5", "stablediffusion": "stable-diffusion-1.5", "stablediffusionv15": "stable-diffusion-1.5",
}  # fmt: skip
#: What stands before a name (whose copy it is), and words that say how or where a network was trained or written.
_OWNER = re.compile(r"^.*/(?=.*[a-z])")
_NO_NAME = re.compile(
    r"(?<![a-z0-9])(v1\.5|model|network|pytorch|torch|tensorflow[12]?|tf[12]?|mxnet|paddle|for|imagenet|in1k|(pre-?)?train(ing)?|fine-?tuning|224"
    r"|coco( ?2017)?|librispeech|ljspeech(-1\.1)?|wikitext-103|ml-20m|ml-25m|criteo( (1tb|terabyte))?|outbrain|wmt1[46]|en-de|brats( ?\d\d)?|dagm2007"
    r"|electricity|cnn-dm|synthetic|phase ?[12]|convergence)(?![a-z0-9])"
)


def plain_name(name: str) -> str:
    """A network's name as it is compared: letters and digits; whose it is ("timm/") and what it was written in don't matter."""
    return re.sub(r"[^a-z0-9]", "", _NO_NAME.sub(" ", _OWNER.sub("", name.lower()).replace("_", "-")))


def _without_remarks(name: str) -> str:
    return re.sub(r"\([^)]*\)|\[[^]]*\]", " ", name)


def find_network(name: str) -> str | None:
    """The zoo's own name of a network however it is spelled; None where the zoo doesn't have it."""
    return _BY_PLAIN_NAME.get(plain_name(name)) or _BY_PLAIN_NAME.get(plain_name(_without_remarks(name)))


def family_of(network: str) -> str:
    """Module that builds a network.

    Raises:
        ValueError: no such network.
    """
    for family, names in FAMILIES.items():
        if network in names:
            return family
    raise ValueError(f"unknown network {network!r}")


_BY_PLAIN_NAME = {**{plain_name(n): n for names in FAMILIES.values() for n in names}, **_ALIASES}
