"""Backend of `torch.compile` that counts its graphs."""

import torchax.dynamo


class CountingBackend:
  """The jax backend, which counts the graphs it receives."""

  def __init__(self):
    self.graphs = []

  def __call__(self, graph, inputs, **options):
    self.graphs.append(graph)
    return torchax.dynamo.backend(graph, inputs, **options)
