"""Transformers of the Hugging Face library: tiny, with random weights.

Nothing is downloaded: models are made from configurations. Sizes are the smallest that
keep the features of a family, such as grouped key heads, a sliding window shorter than
the sequence, or more experts than a token uses.
"""

import torch
import transformers
from ops.harness import floats, ints

VOCABULARY, HIDDEN, INNER, HEADS, LENGTH, BATCH = 64, 16, 32, 2, 8, 2
# Names that most configurations use for the sizes above.
SIZES = {
  "vocab_size": VOCABULARY,
  "hidden_size": HIDDEN,
  "intermediate_size": INNER,
  "num_hidden_layers": 1,
  "num_attention_heads": HEADS,
}
DECODER_SIZES = SIZES | {
  "num_key_value_heads": 1,
  "max_position_embeddings": 2 * LENGTH,
  "use_cache": False,
}


def bert(attention: str, dropout: float) -> transformers.PreTrainedModel:
  """Encoder of words."""
  return transformers.BertForMaskedLM(
    transformers.BertConfig(
      **SIZES,
      max_position_embeddings=2 * LENGTH,
      hidden_dropout_prob=dropout,
      attention_probs_dropout_prob=dropout,
      attn_implementation=attention,
    )
  )


def gpt2(attention: str, dropout: float) -> transformers.PreTrainedModel:
  """Decoder with learned positions."""
  return transformers.GPT2LMHeadModel(
    transformers.GPT2Config(
      vocab_size=VOCABULARY,
      n_positions=2 * LENGTH,
      n_embd=HIDDEN,
      n_layer=1,
      n_head=HEADS,
      bos_token_id=0,
      eos_token_id=0,
      resid_pdrop=dropout,
      embd_pdrop=dropout,
      attn_pdrop=dropout,
      use_cache=False,
      attn_implementation=attention,
    )
  )


def llama(attention: str, dropout: float) -> transformers.PreTrainedModel:
  """Decoder with rotary positions and grouped key heads."""
  return transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      **DECODER_SIZES, attention_dropout=dropout, attn_implementation=attention
    )
  )


def mistral(attention: str, dropout: float) -> transformers.PreTrainedModel:
  """Decoder with a sliding window of attention."""
  return transformers.MistralForCausalLM(
    transformers.MistralConfig(
      **DECODER_SIZES,
      sliding_window=LENGTH // 2,
      attention_dropout=dropout,
      attn_implementation=attention,
    )
  )


def mixtral(
  attention: str, dropout: float, experts: str = "grouped_mm"
) -> transformers.PreTrainedModel:
  """Decoder in which a router chooses two of four experts for each word."""
  return transformers.MixtralForCausalLM(
    transformers.MixtralConfig(
      **DECODER_SIZES,
      num_local_experts=4,
      num_experts_per_tok=2,
      output_router_logits=True,
      attention_dropout=dropout,
      attn_implementation=attention,
      experts_implementation=experts,
    )
  )


def t5(attention: str, dropout: float) -> transformers.PreTrainedModel:
  """Encoder and decoder with relative positions."""
  return transformers.T5ForConditionalGeneration(
    transformers.T5Config(
      vocab_size=VOCABULARY,
      d_model=HIDDEN,
      d_kv=HIDDEN // HEADS,
      d_ff=INNER,
      num_layers=1,
      num_heads=HEADS,
      dropout_rate=dropout,
      decoder_start_token_id=0,
      use_cache=False,
      attn_implementation=attention,
    )
  )


def vit(attention: str, dropout: float) -> transformers.PreTrainedModel:
  """Encoder of images."""
  return transformers.ViTForImageClassification(
    transformers.ViTConfig(
      hidden_size=HIDDEN,
      intermediate_size=INNER,
      num_hidden_layers=1,
      num_attention_heads=HEADS,
      image_size=8,
      patch_size=4,
      num_labels=4,
      hidden_dropout_prob=dropout,
      attention_probs_dropout_prob=dropout,
      attn_implementation=attention,
    )
  )


def whisper(attention: str, dropout: float) -> transformers.PreTrainedModel:
  """Encoder of sound and decoder of words."""
  return transformers.WhisperForConditionalGeneration(
    transformers.WhisperConfig(
      vocab_size=VOCABULARY,
      num_mel_bins=8,
      d_model=HIDDEN,
      encoder_layers=1,
      decoder_layers=1,
      encoder_attention_heads=HEADS,
      decoder_attention_heads=HEADS,
      encoder_ffn_dim=INNER,
      decoder_ffn_dim=INNER,
      max_source_positions=LENGTH,
      max_target_positions=2 * LENGTH,
      pad_token_id=0,
      bos_token_id=0,
      eos_token_id=0,
      decoder_start_token_id=0,
      dropout=dropout,
      attention_dropout=dropout,
      activation_dropout=dropout,
      use_cache=False,
      attn_implementation=attention,
    )
  )


def words() -> torch.Tensor:
  """Return word numbers, without padding."""
  return ints(BATCH, LENGTH, low=1, high=VOCABULARY)


def padding() -> torch.Tensor:
  """Return a mask that pads the last words of the second sentence."""
  mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
  mask[1, -3:] = 0
  return mask


def text() -> dict[str, torch.Tensor]:
  """Return sentences, one of them shorter, and the target words."""
  labels = torch.where(
    padding() == 1, ints(BATCH, LENGTH, high=VOCABULARY, seed=1), -100
  )
  return {"input_ids": words(), "attention_mask": padding(), "labels": labels}


def images() -> dict[str, torch.Tensor]:
  """Return images and their classes."""
  return {"pixel_values": floats(BATCH, 3, 8, 8), "labels": ints(BATCH, high=4)}


def sound() -> dict[str, torch.Tensor]:
  """Return spectra, two steps for each position of the encoder, and their words."""
  return {"input_features": floats(BATCH, 8, 2 * LENGTH), "labels": words()}


FAMILIES = {
  "BERT": (bert, text),
  "GPT-2": (gpt2, text),
  "Llama": (llama, text),
  "Mistral": (mistral, text),
  "Mixtral": (mixtral, text),
  "T5": (t5, text),
  "ViT": (vit, images),
  "Whisper": (whisper, sound),
}
