"""Backend of `torch.compile` that counts its graphs."""

import torchax.dynamo


class CountingBackend:
  """Backend "jax" with a count of the graphs it receives."""

  def __init__(self):
    self.graphs = []

  def __call__(self, graph, inputs, **options):
    self.graphs.append(graph)
    return torchax.dynamo.backend(graph, inputs, **options)
