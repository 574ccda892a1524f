"""`torch.compile(…, backend="jax")`: the functions that Dynamo and AOTAutograd call.

Graphs with jax tensors go to `on_jax.py`. For plain tensors AOTAutograd lowers Dynamo's
graph to ATen operations without mutation. It adds the backward pass where gradients are
needed, and partitions the two. Random operations get keys before the partition
(`draws.py`); each part then becomes one compiled JAX function (`program.py`).
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import (
  aot_module_simplified,
  min_cut_rematerialization_partition,
)
from torch import fx

from torchax.compat import torch_compat
from torchax.compat.patches import patch
from torchax.compat.torch_compat.active_functions import TRANSPARENT
from torchax.devices.generator import Generator
from torchax.dynamo import draws, on_jax, recurrent_graphs
from torchax.dynamo.options import Options
from torchax.dynamo.program import Keys, Program
from torchax.graphs.fx import (
  copy_graph,
  function_name,
  inner_graph,
  inputs,
  is_on_jax,
  line_of,
  results_of,
)
from torchax.logs import is_enabled
from torchax.rng import current, packing
from torchax.subclasses import class_of_user

_logger = logging.getLogger("torchax.dynamo")
_checkpoint = torch.ops.higher_order.tag_activation_checkpoint
_region = torch.ops.higher_order.invoke_subgraph


def backend(
  gm: fx.GraphModule,
  example_inputs: Sequence[Any],
  *,
  mode: str | None = None,
  options: dict[str, Any] | None = None,
) -> Callable:
  """Compile a graph captured by Dynamo with JAX.

  Args:
    gm: the graph; not modified.
    example_inputs: tensors and sizes, one for each input.
    mode: "default" or None.
    options: see `Options`.

  Returns:
    A function of the graph's inputs. Tensors are all on jax or plain tensors on the
    CPU; sizes are Python integers.

  Raises:
    ValueError, TypeError: unknown mode, unknown option or invalid value.
    OperatorNotFound: an operation has no lowering; names its line of user code.
    RngError: the graph makes draws that a compiled graph cannot make.
    PrivateApiError: this version of torch captures graphs in another way.

  >>> double = torch.compile(lambda x: 2 * x, backend=backend)
  >>> double(torch.ones(2))
  tensor([2., 2.])
  """
  chosen = Options.of(mode, options)
  torch_compat.require_capture()
  module = _copy_module(gm)
  on_jax.drop_unused_moves(module.graph)
  if is_on_jax(module, example_inputs):
    return on_jax.compile_graph(module, chosen)
  return _compile_plain(module, example_inputs, chosen)


def _copy_module(gm: fx.GraphModule) -> fx.GraphModule:
  module = fx.GraphModule(gm, copy_graph(gm.graph))
  module.meta = dict(gm.meta)
  if hasattr(gm, "_param_name_to_source"):
    module._param_name_to_source = gm._param_name_to_source
  return module


def _compile_plain(module, example_inputs, options: Options) -> Callable:
  _inline_regions(module, example_inputs)
  recurrent_graphs.replace(module)
  draws.add_input(module.graph)
  module.recompile()
  example = torch_compat.to_fake(torch.zeros(3, dtype=torch.uint32))
  keys = Keys(function_name(module.graph) or "function")
  with torch_compat.keep_unused_draws():
    compiled = aot_module_simplified(
      module,
      [*example_inputs, example],
      fw_compiler=functools.partial(_compile, options, keys, "forward"),
      bw_compiler=functools.partial(_compile, options, keys, "backward"),
      inference_compiler=functools.partial(_compile_inference, options, keys),
      partition_fn=functools.partial(_partition, keys),
      # Autograd must not record changes of inputs under no_grad.
      keep_inference_input_mutations=True,
    )
  return torch.compiler.disable(_Compiled(compiled, keys))


def _inline_regions(module: fx.GraphModule, example_inputs: Sequence) -> None:
  """Replace operators that only run an inner graph by calls of that graph.

  These are nested compiled regions, since XLA compiles the whole graph. Without
  gradients these are checkpoints too: there is no backward pass to recompute them in.
  torch looks for one nevertheless, and rejects checkpoints that draw.
  """
  records = torch.is_grad_enabled() and any(
    isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
  )
  # Operator -> number of arguments between the graph and its operands.
  regions = {_region: 1} if records else {_region: 1, _checkpoint: 0}
  for node in list(module.graph.nodes):
    if node.op != "call_function" or node.target not in regions:
      continue
    body, *args = node.args
    function = inner_graph(body)
    assert function is not None, f"{node} runs no graph"
    own = fx.GraphModule(function, copy_graph(function.graph))
    _inline_regions(own, example_inputs)
    name = f"{body.target}_inline"
    module.add_submodule(name, own)
    with module.graph.inserting_before(node):
      call = module.graph.call_module(name, tuple(args[regions[node.target] :]))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    module.graph.erase_node(node)
  draws.remove_idle_dropout(module.graph)
  module.recompile()


def _compile(options: Options, keys: Keys, name: str, module, example_inputs):
  _log(name, module, keys.rng)
  visible = keys.visible if name == "forward" else 0
  return Program(module, options, keys, name, visible)


def _compile_inference(options: Options, keys: Keys, module, example_inputs):
  _key_draws(module.graph, inputs(module.graph)[-1], keys)
  _log("inference", module, keys.rng)
  visible = len(results_of(module.graph))
  return Program(module, options, keys, "inference", visible)


def _partition(keys: Keys, module, joint_inputs, *, num_fwd_outputs, **kwargs):
  primals = [node for node in inputs(module.graph) if "tangents" not in node.name]
  _key_draws(module.graph, primals[-1], keys)
  keys.visible = num_fwd_outputs
  return min_cut_rematerialization_partition(
    module, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
  )


def _key_draws(graph: fx.Graph, rng_input: fx.Node, keys: Keys) -> None:
  meta = rng_input.meta["val"]
  assert meta.dtype is torch.uint32 and meta.dim() == 1, f"{rng_input} is no key"
  keys.rng = rng_input.name
  keys.draws, keys.sites = draws.key_draws(graph, rng_input)
  assert graph.owning_module is not None
  graph.owning_module.recompile()


torch_compat.trace_for_jax(Generator, class_of_user)
# Programs are compiled and run in backward passes, which compiled code may call.
torch_compat.keep_from_dynamo(Program, _compile)
# By default Dynamo breaks the graph at LSTM, GRU and RNN, and CPU torch runs them.
torch_compat.trace_recurrent_layers()
# A module's draws have the same sites whether it is compiled or not.
patch(
  torch_compat.compiled_module_class(),
  TRANSPARENT,
  "_orig_mod",
  "the same sites of draws in compiled modules",
)


class _Compiled:
  """Compiled function that Dynamo calls; it adds the packed key of the stream."""

  def __init__(self, function: Callable, keys: Keys):
    self._function, self._keys = function, keys
    self._packer = packing.Packer()
    self._unused = torch.zeros(3, dtype=torch.uint32)
    self.__name__ = "compiled"

  def __call__(self, *args):
    keys = self._keys
    if not keys.draws:
      return self._function(*args, self._unused)
    with current().lock:
      words, keys.form = self._packer.pack(on_jax.NAME, tuple(keys.sites))
      result = self._function(*args, torch.from_numpy(words))
      packing.commit(keys.draws, keys.sites, keys.log)
    return result


# Logs ---------------------------------------------------------------------------------


def _log(name: str, module: fx.GraphModule, rng: str) -> None:
  """Log a graph before it is compiled, if `torchax.set_logs` enabled that."""
  nodes = list(module.graph.nodes)
  if is_enabled("graphs"):
    code = module.print_readable(print_output=False)
    _logger.info("graph of %s:\n%s", name, code)
  if is_enabled("operands"):
    operands = [_operand(node, rng) for node in inputs(module.graph)]
    _logger.info("operands of %s:\n%s", name, "\n".join(operands))
  if is_enabled("draws"):
    drawn = [_draw(node) for node in nodes if node.target is draws.run_keyed]
    _logger.info("draws of %s:\n%s", name, "\n".join(drawn) or "  none")


def _operand(node: fx.Node, rng: str) -> str:
  meta = node.meta.get("val")
  if not isinstance(meta, torch.Tensor):
    return f"  {node.name}: size"
  key = "  (key and count)" if node.name == rng else ""
  return f"  {node.name}: {_describe(meta)}{key}"


def _draw(node: fx.Node) -> str:
  _, number, operation, *_ = node.args
  meta = node.meta.get("val")
  first = next((m for m in (meta if isinstance(meta, tuple) else (meta,))), None)
  location = "  ".join(filter(None, (draws.site_of(node), line_of(node))))
  return f"  {number}  {operation}  {_describe(first)}  {location}"


def _describe(tensor) -> str:
  return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
