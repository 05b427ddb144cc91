"""Every network of the zoo has exactly the parameters that its authors, or the reference it follows, publish."""

import pytest
import torch

from advisor.workload.precision import OPTIMIZERS
from advisor.zoo.names import _ALIASES, FAMILIES, family_of, find_network
from advisor.zoo.workload import zoo_network

#: torchvision, timm, Hugging Face and OpenAI list these; NVIDIA's READMEs and NeMo's names give those of `ROUNDED`, in millions.
PARAMETERS = {
    "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160, "resnet152": 60_192_808,
    "resnext50-32x4d": 25_028_904, "resnext101-32x4d": 44_177_704, "se-resnext101-32x4d": 48_955_416, "efficientnet-b0": 5_288_548,
    "efficientnet-b1": 7_794_184, "efficientnet-b2": 9_109_994, "efficientnet-b3": 12_233_232, "efficientnet-b4": 19_341_616,
    "efficientnet-b5": 30_389_784, "efficientnet-b6": 43_040_704, "efficientnet-b7": 66_347_960, "efficientnet-v2-s": 21_458_488,
    "efficientnet-v2-m": 54_139_356, "vgg16": 138_357_544, "mobilenet-v2": 3_504_872, "mobilenet-v3-large": 5_483_032, "densenet121": 7_978_856,
    "inception-v3": 27_161_264, "vit-tiny-16": 5_717_416, "vit-small-16": 22_050_664, "vit-base-16": 86_567_656, "vit-large-16": 304_326_632,
    "swin-tiny": 28_288_354, "swin-base": 87_768_224, "convnext-tiny": 28_589_128, "convnext-base": 88_591_464, "clip-vit-base-32": 151_277_313,
    "stable-diffusion-1.5": 859_520_964, "stable-diffusion-xl": 2_567_463_684, "whisper-tiny": 37_184_640, "whisper-large": 1_541_384_960,
    "unet": 31_030_658, "mask-rcnn": 44_401_393, "wide-resnet50-2": 68_883_240, "wide-resnet101-2": 126_886_696, "resnext101-32x8d": 88_791_336,
    "resnext101-64x4d": 83_455_272, "se-resnet50": 28_088_024, "se-resnext50-32x4d": 27_559_896, "vit-base-32": 88_224_232,
    "vit-large-32": 306_535_400, "vit-huge-14": 632_045_800, "swin-small": 49_606_258, "swin-large": 196_532_476, "convnext-small": 50_223_688,
    "convnext-large": 197_767_336, "bart-base": 139_420_416, "bart-large": 406_291_456, "t5-small": 60_506_624, "t5-base": 222_903_552,
    "t5-large": 737_668_096, "flan-t5-small": 76_961_152, "flan-t5-base": 247_577_856, "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184, "tacotron-2": 28_193_153,
}  # fmt: skip
ROUNDED = {
    "jasper-10x5": 333, "quartznet-15x5": 18.9, "nnunet-3d": 31.2, "transformer-big": 210, "transformer-xl-base": 192, "gnmt": 160, "ncf": 31.8,
    "t5-220m": 220, "t5-11b": 11_000, "t5-23b": 23_500, "t5-41b": 41_200, "mt5-170m": 172, "mt5-390m": 390, "waveglow": 268,
    "albert-base": 11.8, "albert-large": 17.8, "albert-xlarge": 59, "albert-xxlarge": 223, "electra-small": 14.2, "wav2vec2-base": 95.0,
    "wav2vec2-large": 317, "fastpitch": 46.3, "hifi-gan": 13.9 + 41.1 + 29.6, "vnet": 65.2, "dlrm": 2.37,
}  # fmt: skip


def num_parameters(name):
    with torch.device("meta"):
        return sum(p.numel() for p in zoo_network(name).build_model().parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    assert num_parameters(name) == PARAMETERS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_the_rounded_ones_of_the_name_or_readme(name):
    assert num_parameters(name) / 1e6 == pytest.approx(ROUNDED[name], rel=0.01)


def test_every_name_belongs_to_one_family_that_builds_it():
    names = [name for family in FAMILIES.values() for name in family]
    assert len(names) == len(set(names))
    for name in names:
        assert find_network(name) == name
        assert zoo_network(name).optimizer in OPTIMIZERS
    assert set(_ALIASES.values()) <= set(names)
    with pytest.raises(ValueError, match="alexnet"):
        family_of("alexnet")


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [("EfficientNet v1-B4", "efficientnet-b4"), ("efficientnet_b4", "efficientnet-b4"), ("EfficientNet v2-S", "efficientnet-v2-s"),
     ("tf_efficientnetv2_s", "efficientnet-v2-s"), ("ResNet50 v1.5", "resnet50"), ("resnet50-v1.5", "resnet50"), ("RN50", "resnet50"),
     ("ResNet-18", "resnet18"), ("ResNeXt101-32x4d", "resnext101-32x4d"), ("SE-ResNeXt101-32x4d", "se-resnext101-32x4d"),
     ("SSD300 v1.1", "ssd300"), ("Transformer-XL Base model", "transformer-xl-base"), ("GNMT v2", "gnmt"), ("NCF", "ncf"),
     ("mT5-390M", "mt5-390m"), ("t5-3B", "t5-3b"), ("ViT-B/16", "vit-base-16"), ("google/vit-base-patch16-224", "vit-base-16"),
     ("DeiT-S", "vit-small-16"), ("microsoft/swin-tiny-patch4-window7-224", "swin-tiny"), ("Swin-T", "swin-tiny"), ("ConvNeXt-T", "convnext-tiny"),
     ("CLIP ViT-B/32", "clip-vit-base-32"), ("openai/clip-vit-base-patch32", "clip-vit-base-32"), ("openai/whisper-large-v2", "whisper-large"),
     ("SDXL", "stable-diffusion-xl"), ("Stable Diffusion v1.5", "stable-diffusion-1.5"), ("Inception V3", "inception-v3"), ("VGG-16", "vgg16"),
     ("Jasper", "jasper-10x5"), ("Mask R-CNN R50-FPN", "mask-rcnn"), ("nnU-Net", "nnunet-3d"), ("U-Net Medical", "unet"), ("Transformer-Big", "transformer-big"), ("ResNet50 v1.5 MXNet", "resnet50"), ("Tacotron 2", "tacotron-2"), ("Mask R-CNN", "mask-rcnn"), ("MaskRCNN", "mask-rcnn"),
     ("ResNeXt101", "resnext101-32x4d"), ("SE-ResNeXt-101", "se-resnext101-32x4d"), ("Wide ResNet-50-2", "wide-resnet50-2"), ("nnU-Net 2D", "nnunet-2d"),
     ("nnU-Net 3D", "nnunet-3d"), ("3D-UNet", "nnunet-3d"), ("UNet Medical", "unet"), ("UNet_Industrial", "unet-industrial"),
     ("U-Net Industrial DAGM2007", "unet-industrial"), ("V-Net", "vnet"), ("Transformer", "transformer-big"), ("Wide & Deep", "wide-and-deep"),
     ("WideAndDeep", "wide-and-deep"), ("VAE-CF", "vae-cf"), ("Temporal Fusion Transformer", "tft"), ("TFT electricity", "tft"), ("HiFi-GAN", "hifi-gan"),
     ("FastPitch 1.1", "fastpitch"), ("DLRM small (FL15)", "dlrm"), ("wav2vec 2.0 Base", "wav2vec2-base"), ("facebook/wav2vec2-large", "wav2vec2-large"),
     ("ELECTRA-Base pretraining phase 1", "electra-base"), ("google/electra-base-discriminator", "electra-base"), ("facebook/bart-large-cnn", "bart-large"),
     ("google/flan-t5-xl", "flan-t5-xl"), ("albert-xxlarge-v2", "albert-xxlarge"), ("EfficientNet-WideSE-B4", "efficientnet-widese-b4"),
     ("NCF (ML-20m)", "ncf"), ("SSD300 v1.1 COCO", "ssd300"), ("ViT-H/14", "vit-huge-14"), ("Swin-L", "swin-large"), ("Jasper LibriSpeech", "jasper-10x5")],
)  # fmt: skip
def test_names_are_found_however_they_are_spelled(spelled, meant):
    assert find_network(spelled) == meant


@pytest.mark.parametrize(
    "unknown",
    [
        "",
        "-",
        "resnet",
        "resnet50d",
        "efficientnet",
        "bert-large",
        "llama3-8B",
        "t5",
        "gpt3-175B",
        "vit",
        "amp-transgan",
        "se3-transformer",
        "transformer-xl-small",
        "wide-resnet",
    ],
)
def test_a_name_is_never_taken_for_another_network(unknown):
    assert find_network(unknown) is None
