"""diffusers' pipelines on jax equal the CPU's, from the same noise."""

import copy

import pytest
import torch

diffusers = pytest.importorskip(
  "diffusers", reason="the extra `ecosystem` is not installed"
)

LIBRARY, DISTRIBUTION = "diffusers", "diffusers"
LINES = '`torchax.enable_globally()`; `pipeline.to("jax")`'
STEPS = 2

pytestmark = pytest.mark.usefixtures("env")


@pytest.fixture(scope="module")
def unet():
  torch.manual_seed(0)
  return diffusers.UNet2DModel(
    sample_size=8,
    layers_per_block=1,
    block_out_channels=(8,),
    norm_num_groups=4,
    down_block_types=("AttnDownBlock2D",),
    up_block_types=("AttnUpBlock2D",),
    attention_head_dim=4,
  ).eval()


def _images(pipeline, device: str, generator, **options):
  pipeline = pipeline.to(device)
  pipeline.set_progress_bar_config(disable=True)
  options = {"num_inference_steps": STEPS, "output_type": "np", **options}
  return pipeline(generator=generator, **options).images


def _generator(seed: int = 3, device: str = "cpu") -> torch.Generator:
  return torch.Generator(device=device).manual_seed(seed)


SAMPLERS = {
  "DDPM": lambda unet: diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()),
  "DDIM": lambda unet: diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler()),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_images_from_noise_of_the_cpu_equal_the_cpu(unet, sampler):
  make = SAMPLERS[sampler]
  expected = _images(make(copy.deepcopy(unet)), "cpu", _generator())
  actual = _images(make(copy.deepcopy(unet)), "jax", _generator())
  assert actual == pytest.approx(expected, abs=1e-4)


def test_jax_generator_gives_equal_images_for_equal_seeds(unet):
  pipeline = SAMPLERS["DDPM"](copy.deepcopy(unet))
  first, other, again = (
    _images(pipeline, "jax", _generator(seed, "jax")) for seed in (1, 2, 1)
  )
  assert (first == again).all()
  assert (first != other).any()


def test_a_transformer_of_latents_gives_the_images_of_the_cpu():
  torch.manual_seed(0)
  transformer = diffusers.DiTTransformer2DModel(
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=8,
    num_layers=1,
    sample_size=4,
    patch_size=2,
  ).eval()
  decoder = diffusers.AutoencoderKL(
    block_out_channels=(8,), layers_per_block=1, norm_num_groups=4, sample_size=8
  ).eval()

  def images(device):
    pipeline = diffusers.DiTPipeline(
      copy.deepcopy(transformer),
      copy.deepcopy(decoder),
      diffusers.DPMSolverMultistepScheduler(),
    )
    return _images(pipeline, device, _generator(), class_labels=[1, 2])

  assert images("jax") == pytest.approx(images("cpu"), abs=1e-3)


def test_a_pipeline_is_saved_and_loaded(unet, tmp_path):
  pipeline = SAMPLERS["DDIM"](copy.deepcopy(unet))
  expected = _images(pipeline, "jax", _generator())
  pipeline.save_pretrained(tmp_path)
  loaded = diffusers.DDIMPipeline.from_pretrained(tmp_path)
  assert loaded.device.type == "cpu"
  assert _images(loaded, "jax", _generator()) == pytest.approx(expected, abs=1e-6)


def test_training_with_a_moving_average_equals_the_cpu(unet):
  averages = {}
  for device in ("cpu", "jax"):
    model = copy.deepcopy(unet).train().to(device)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=10)
    average = diffusers.training_utils.EMAModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = _generator()
    for _ in range(2):
      images = torch.randn(1, 3, 8, 8, generator=generator).to(device)
      noise = torch.randn(1, 3, 8, 8, generator=generator).to(device)
      times = torch.randint(0, 10, (1,), generator=generator).to(device)
      predicted = model(scheduler.add_noise(images, noise, times), times).sample
      torch.nn.functional.mse_loss(predicted, noise).backward()
      optimizer.step()
      optimizer.zero_grad()
      average.step(model.parameters())
    averages[device] = [p.detach().cpu() for p in average.shadow_params]
  for actual, expected in zip(averages["jax"], averages["cpu"], strict=True):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)
