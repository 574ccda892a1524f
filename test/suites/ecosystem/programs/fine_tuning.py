"""Fine-tuning of language models with trl, and of embeddings of sentences."""

import math
import random
import tempfile

import torch
from ecosystem.programs import program

# An import, and a call of `use_jax()`.
TWO_LINES = 2
WORDS = [f"w{number}" for number in range(40)]


def _sentences(count: int, words: int) -> list[str]:
  chance = random.Random(count)
  return [" ".join(chance.choices(WORDS, k=words)) for _ in range(count)]


def _tokenizer():
  import tokenizers
  import transformers

  special = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
  numbers = {word: n for n, word in enumerate([*special.values(), *WORDS])}
  model = tokenizers.models.WordLevel(numbers, unk_token="<unk>")
  words = tokenizers.Tokenizer(model)
  words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=words,
    model_max_length=32,
    **{f"{name}_token": token for name, token in special.items()},
  )


def _choose(device: str) -> None:
  """Choose the device of the Trainer; a program does so once, at its start."""
  from accelerate.state import AcceleratorState

  from torchax.integrations import transformers as integration

  AcceleratorState._reset_state(reset_partial_state=True)
  if device == "jax":
    integration.use_jax()


def _train(trainer_class, arguments_class, device: str, **options) -> list[float]:
  """Return the losses of three steps."""
  from transformers import PrinterCallback

  with tempfile.TemporaryDirectory() as folder:
    arguments = arguments_class(
      folder,
      per_device_train_batch_size=2,
      max_steps=3,
      logging_steps=1,
      learning_rate=0.01,
      save_strategy="no",
      bf16=False,
      use_cpu=device == "cpu",
      report_to=[],
      disable_tqdm=True,
      **options.pop("arguments", {}),
    )
    trainer = trainer_class(args=arguments, **options)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
  assert {p.device.type for p in trainer.model.parameters()} == {device}
  return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@program(
  "trl: SFT, DPO, a reward model, GRPO with its own completions",
  library="trl",
  lines=TWO_LINES,
)
def fine_tuning(device):
  import transformers
  import trl
  from datasets import Dataset

  _choose(device)
  tokenizer = _tokenizer()
  config = transformers.LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    num_labels=1,
  )

  def model(name="ForCausalLM"):
    torch.manual_seed(0)
    return getattr(transformers, f"Llama{name}")(config)

  def train(name, model, columns, **options):
    classes = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    options |= {"model": model, "processing_class": tokenizer}
    return _train(*classes, device, train_dataset=Dataset.from_dict(columns), **options)

  sentences = _sentences(36, 4)
  prompts = sentences[:12]
  pairs = {"chosen": sentences[12:24], "rejected": sentences[24:]}
  rewards = []

  def reward(completions, **_):
    rewards.extend(float(len(set(words.split()))) for words in completions)
    return rewards[-len(completions) :]

  group = {"num_generations": 2, "max_completion_length": 4, "generation_batch_size": 2}
  online = train(
    "GRPO", model(), {"prompt": prompts}, reward_funcs=reward, arguments=group
  )
  return {
    "sft": train("SFT", model(), {"text": prompts}),
    "dpo": train("DPO", model(), {"prompt": prompts, **pairs}, ref_model=model()),
    "reward": train("Reward", model("ForSequenceClassification"), pairs),
    "completions have words": len(rewards) == 6 and min(rewards) > 0,
    "online losses are finite": all(map(math.isfinite, online)),
  }


@program(
  "sentence-transformers: embeddings, search, four losses",
  library="sentence-transformers",
  lines=TWO_LINES,
)
def sentence_embeddings(device):
  import sentence_transformers
  import transformers
  from datasets import Dataset
  from sentence_transformers import losses, models, util

  _choose(device)
  config = transformers.BertConfig(
    vocab_size=len(WORDS) + 4,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
  )
  torch.manual_seed(0)
  with tempfile.TemporaryDirectory() as folder:
    transformers.BertModel(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    words = models.Transformer(folder)
  pooling = models.Pooling(16)
  normalize = models.Normalize()
  model = sentence_transformers.SentenceTransformer(
    modules=[words, pooling, normalize], device=device
  )
  found = model.encode(_sentences(6, 5), convert_to_tensor=True)
  ranked = losses.MultipleNegativesRankingLoss(model)
  sentences = _sentences(32, 4)
  pairs = {"anchor": sentences[:16], "positive": sentences[16:]}
  scored = pairs | {"score": [n / 16 for n in range(16)]}
  by_loss = (
    ("in batch", ranked, pairs),
    ("nested", losses.MatryoshkaLoss(model, ranked, [16, 8]), pairs),
    ("cosine", losses.CosineSimilarityLoss(model), scored),
    ("order", losses.CoSENTLoss(model), scored),
  )
  classes = (
    sentence_transformers.SentenceTransformerTrainer,
    sentence_transformers.SentenceTransformerTrainingArguments,
  )
  hits = util.semantic_search(found[:2], found, top_k=2)
  return {
    "embeddings": found,
    "similarities": util.cos_sim(found[:2], found),
    "hits": [[hit["corpus_id"] for hit in row] for row in hits],
    **{
      name: _train(
        *classes, device, model=model, loss=loss, train_dataset=Dataset.from_dict(data)
      )
      for name, loss, data in by_loss
    },
  }
