"""Programs on text: transformers and recurrent networks that train and generate."""

import math

import torch
from ecosystem.programs import program
from torch import nn

F = nn.functional
TEXT = "to be or not to be that is the question "
LETTERS = sorted(set(TEXT))


def _encoded(times: int) -> torch.Tensor:
  return torch.tensor([LETTERS.index(letter) for letter in TEXT * times])


class Attention(nn.Module):
  """Causal self-attention with one projection for queries, keys and values."""

  def __init__(self, width: int, heads: int, block: int):
    super().__init__()
    self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
    self.heads = heads
    mask = torch.tril(torch.ones(block, block)).view(1, 1, block, block)
    self.register_buffer("mask", mask)

  def forward(self, x):
    b, t, c = x.size()
    parts = self.c_attn(x).split(c, dim=2)
    q, k, v = [p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts]
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
    y = F.softmax(att, dim=-1) @ v
    return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Layer(nn.Module):
  """Layer of pre-norm attention and MLP."""

  def __init__(self, width: int, heads: int, block: int):
    super().__init__()
    self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
    self.attn = Attention(width, heads, block)
    self.mlp = nn.Sequential(
      nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )

  def forward(self, x):
    x = x + self.attn(self.ln_1(x))
    return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
  """Small GPT whose output weights are its token embeddings."""

  def __init__(self, width=32, heads=4, layers=2, block=16):
    super().__init__()
    vocab = len(LETTERS)
    self.block = block
    self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block, width)
    self.h = nn.ModuleList([Layer(width, heads, block) for _ in range(layers)])
    self.ln_f = nn.LayerNorm(width)
    self.lm_head = nn.Linear(width, vocab, bias=False)
    self.wte.weight = self.lm_head.weight

  def forward(self, idx, targets=None):
    pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
    x = self.wte(idx) + self.wpe(pos)
    for layer in self.h:
      x = layer(x)
    x = self.ln_f(x)
    if targets is None:
      return self.lm_head(x[:, [-1], :]), None
    logits = self.lm_head(x)
    flat, wanted = logits.view(-1, logits.size(-1)), targets.view(-1)
    return logits, F.cross_entropy(flat, wanted, ignore_index=-1)

  @torch.no_grad()
  def generate(self, idx, new_tokens, temperature=1.0, top_k=None):
    for _ in range(new_tokens):
      cond = idx if idx.size(1) <= self.block else idx[:, -self.block :]
      logits, _ = self(cond)
      logits = logits[:, -1, :] / temperature
      if top_k is not None:
        v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
        logits[logits < v[:, [-1]]] = -float("Inf")
      probs = F.softmax(logits, dim=-1)
      idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
    return idx


def _batch(data, device, size=8, block=16):
  starts = torch.randint(len(data) - block, (size,))
  x = torch.stack([data[i : i + block] for i in starts])
  y = torch.stack([data[i + 1 : i + 1 + block] for i in starts])
  return x.to(device), y.to(device)


@program("GPT training: gradient accumulation, clipping, warmup and cosine decay")
def gpt_training(device):
  data = _encoded(8)
  model = GPT().to(device)
  groups = [
    {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
  ]
  optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
  losses, steps = [], 12
  for step in range(steps):
    rate = 1e-3 * min(1, (step + 1) / 3) * (1 + math.cos(math.pi * step / steps)) / 2
    for group in optimizer.param_groups:
      group["lr"] = rate
    for _ in range(2):
      _, loss = model(*_batch(data, device))
      (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
  return {"losses": losses}


@program("GPT generation: top-k, multinomial, 24 tokens")
def gpt_generation(device):
  model = GPT().to(device).eval()
  start = torch.tensor([[0, 3, 5]], device=device)
  greedy = model.generate(start, 24, top_k=1)
  drawn = model.generate(start, 24, temperature=0.8, top_k=5)
  is_token = ((drawn >= 0) & (drawn < len(LETTERS))).all().item()
  return {"greedy": greedy, "shape": list(drawn.shape), "is_token": is_token}


class WordModel(nn.Module):
  """Embedding, recurrent network, decoder."""

  def __init__(self, kind: str, tokens: int, width: int):
    super().__init__()
    self.drop, self.encoder = nn.Dropout(0.0), nn.Embedding(tokens, width)
    self.rnn = getattr(nn, kind)(width, width, 2)
    self.decoder = nn.Linear(width, tokens)
    nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
    nn.init.zeros_(self.decoder.bias)

  def forward(self, words, hidden):
    output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
    decoded = self.decoder(self.drop(output)).view(-1, self.decoder.out_features)
    return F.log_softmax(decoded, dim=1), hidden

  def init_hidden(self, batch: int):
    zeros = next(self.parameters()).new_zeros(2, batch, self.rnn.hidden_size)
    return (zeros, zeros.clone()) if isinstance(self.rnn, nn.LSTM) else zeros


def _repackage(hidden):
  if isinstance(hidden, torch.Tensor):
    return hidden.detach()
  return tuple(_repackage(part) for part in hidden)


@program("word model: LSTM and GRU, truncated backpropagation, plain SGD in place")
def word_model(device):
  data = _encoded(8)
  data = data.narrow(0, 0, len(data) // 4 * 4).view(4, -1).t().contiguous().to(device)
  losses = []
  for kind in ("LSTM", "GRU"):
    model = WordModel(kind, len(LETTERS), 16).to(device)
    hidden = model.init_hidden(4)
    for start in range(0, 60, 10):
      words = data[start : start + 10]
      targets = data[start + 1 : start + 11].view(-1)
      model.zero_grad()
      output, hidden = model(words, _repackage(hidden))
      loss = F.nll_loss(output, targets)
      loss.backward()
      nn.utils.clip_grad_norm_(model.parameters(), 0.25)
      for p in model.parameters():
        p.data.add_(p.grad, alpha=-5.0)
      losses.append(loss.item())
  return {"losses": losses, "perplexity": math.exp(losses[-1])}


@program("sequence pairs: encoder and decoder of nn.Transformer, padding masks, beam")
def sequence_pairs(device):
  source = torch.randint(3, 12, (6, 7))
  source[3:, 5:] = 0
  source = source.to(device)
  target = torch.cat([torch.ones_like(source[:, :1]), source.flip(1)], dim=1)
  embed, out = nn.Embedding(12, 16, padding_idx=0).to(device), nn.Linear(16, 12)
  model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True).to(device)
  out.to(device)
  parameters = [*embed.parameters(), *model.parameters(), *out.parameters()]
  optimizer = torch.optim.Adam(parameters, lr=1e-3)

  def logits(inputs):
    length = inputs.size(1)
    causal = nn.Transformer.generate_square_subsequent_mask(length, device=device)
    padding = source == 0
    hidden = model(
      embed(source),
      embed(inputs),
      tgt_mask=causal,
      src_key_padding_mask=padding.float().masked_fill(padding, float("-inf")),
    )
    return out(hidden)

  losses = []
  for _ in range(4):
    scores = logits(target[:, :-1])
    wanted = target[:, 1:].reshape(-1)
    loss = F.cross_entropy(scores.reshape(-1, 12), wanted, ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  with torch.no_grad():
    ys = target[:, :1]
    for _ in range(5):
      ys = torch.cat([ys, logits(ys)[:, -1].argmax(-1, keepdim=True)], dim=1)
  return {"losses": losses, "decoded": ys}


@program(
  "x-transformers: rotary decoder, AutoregressiveWrapper", library="x-transformers"
)
def x_transformers(device):
  from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

  network = TransformerWrapper(
    num_tokens=len(LETTERS),
    max_seq_len=16,
    attn_layers=Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True, ff_glu=True),
  )
  model = AutoregressiveWrapper(network).to(device)
  optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
  data = _encoded(2)[:68].view(4, 17).to(device)
  losses = []
  for _ in range(4):
    loss = model(data)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
  model.eval()
  return {"losses": losses, "text": model.generate(data[:1, :4], 8, temperature=0.0)}
