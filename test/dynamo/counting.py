"""A backend of `torch.compile` that counts."""

import torchax.dynamo


class CountingBackend:
  """The backend; counts the graphs it is given."""

  def __init__(self):
    self.graphs = []

  def __call__(self, graph, inputs, **options):
    self.graphs.append(graph)
    return torchax.dynamo.backend(graph, inputs, **options)
