"""The files of `compat/torch_compat`: their names are one namespace."""

import collections
import importlib
import pkgutil

from torchax.compat import torch_compat



class Wrapper(torch.Tensor):
  """A tensor without memory that counts its operations."""

  calls = 0
  __torch_function__ = torch_compat.disabled_torch_function

  @classmethod
  def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
    cls.calls += 1
    return torch.ones(3)


def wrapper(**options) -> Wrapper:
  return torch_compat.make_wrapper(Wrapper, (3,), **options)


def test_a_wrapper_has_the_metadata_it_was_given():
  made = wrapper(
    strides=(2,), storage_offset=1, dtype=torch.float16, requires_grad=True
  )
  assert made.shape == (3,) and made.stride() == (2,) and made.storage_offset() == 1
  assert made.dtype == torch.float16 and made.requires_grad and made.is_leaf
  assert type(made) is Wrapper


def test_operations_on_a_wrapper_go_to_its_class():
  before = Wrapper.calls
  assert type(wrapper() + 1) is torch.Tensor
  assert Wrapper.calls == before + 1


def test_without_dispatch_operations_treat_wrappers_as_plain():
  before = Wrapper.calls
  with torch_compat.without_dispatch():
    result = torch.ops.aten.expand.default(wrapper(), (2, 3))
  assert Wrapper.calls == before
  assert result.shape == (2, 3) and result.stride() == (0, 1)


def test_backward_of_a_wrapper_runs_on_the_calling_thread():
  threads = []

  class Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
      return x * 2

    @staticmethod
    def backward(ctx, grad):
      threads.append(threading.get_ident())
      return grad * 2

  x = torch.ones(3, device="jax", requires_grad=True)
  Notes.apply(x).sum().backward()
  assert threads == [threading.get_ident()]


def test_set_metadata_copies_metadata_and_keeps_identity():
  tensor = torch.zeros(2, 3, device="jax")
  source = torch.zeros(4, dtype=torch.int32, device="jax")
  identity = id(tensor)
  torch_compat.set_metadata(tensor, source)
  assert id(tensor) == identity
  assert tensor.shape == (4,) and tensor.dtype == torch.int32


def test_metadata_can_be_set_inside_an_operation():
  tensor = torch.arange(6.0, device="jax").view(2, 3).clone()
  assert tensor.t_() is tensor
  assert tensor.shape == (3, 2) and tensor.stride() == (1, 3)


def test_a_tensor_becomes_a_parameter():
  tensor = torch.ones(2, device="jax")
  assert not torch_compat.is_parameter(tensor)
  assert torch_compat.mark_as_parameter(tensor) is tensor
  assert torch_compat.is_parameter(tensor)
  assert torch_compat.is_parameter(torch.nn.Parameter(torch.ones(2)))
  assert not torch_compat.is_parameter(torch.ones(2))


# Modes --------------------------------------------------------------------------------


class Mode(TorchFunctionMode):
  """Notes that it was asked."""

  asked = 0

  def __torch_function__(self, func, types, args=(), kwargs=None):
    self.asked += 1
    return func(*args, **(kwargs or {}))


def test_without_function_modes_bypasses_function_modes():
  mode = Mode()
  with mode:
    torch.ones(1)
    before = mode.asked
    with torch_compat.without_function_modes():
      torch.ones(1)
    assert mode.asked == before
    torch.ones(1)
  assert mode.asked == before + 1


def test_without_modes_disables_all_modes():
  mode = Mode()
  seen = []

  class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
      seen.append(func)
      return func(*args, **(kwargs or {}))

  with mode, Dispatch():
    with torch_compat.without_modes():
      torch.ones(1)
    assert not seen
    torch.ones(1)
  assert seen


def test_dispatch_is_excluded_under_without_dispatch():
  assert not torch_compat.dispatch_is_excluded()
  with torch_compat.without_dispatch():
    assert torch_compat.dispatch_is_excluded()
  torch.tensor([1.0], device="jax")
  assert not torch_compat.dispatch_is_excluded()


# The backend --------------------------------------------------------------------------


def test_the_backend_has_the_name_jax():
  assert torch._C._get_privateuse1_backend_name() == torch_compat.BACKEND == "jax"
  assert torch.device("jax:0").type == "jax"
  assert torch.jax is torchax.device_module


def test_registering_the_backend_twice_is_harmless():
  torch_compat.register_backend(torchax.device_module)
  assert torch.ones(1, device="jax").device.type == "jax"


def test_generated_methods_exist():
  assert isinstance(torch.ones(2).jax(), Tensor)
  assert not torch.ones(2).is_jax and torch.ones(2, device="jax").is_jax
  assert isinstance(torch.nn.Linear(2, 2).jax().weight, Tensor)


def test_the_accelerator_api_asks_python_about_the_device():
  assert torch.accelerator.is_available()
  assert torch.accelerator.current_accelerator(True) == torch.device("jax")
  for name, answer in torchax.device_module.ANSWERS.items():
    known = getattr(torch._C, f"_accelerator_{name}", answer)
    assert known is answer, name
  assert torch.accelerator.device_count() == 1


# Functions ----------------------------------------------------------------------------

PARSED = {
  "device": (("cpu",), {}, (torch.device("cpu"), None)),
  "index": (("jax:0",), {}, (torch.device("jax:0"), None)),
  "dtype": ((torch.float16,), {}, (None, torch.float16)),
  "both": (("cpu", torch.int8), {}, (torch.device("cpu"), torch.int8)),
  "keywords": (
    (),
    {"device": "cpu", "dtype": torch.int8},
    (torch.device("cpu"), torch.int8),
  ),
  "non_blocking": (("cpu", None, True), {}, (torch.device("cpu"), None)),
}


@pytest.mark.parametrize("row", PARSED.values(), ids=PARSED)
def test_the_arguments_of_to_are_parsed(row):
  args, kwargs, expected = row
  assert torch_compat.parse_to(*args, **kwargs)[:2] == expected


BUILTINS = {
  "linear": (torch_compat.linear, torch.nn.functional.linear),
  "attention": (
    torch_compat.scaled_dot_product_attention,
    torch.nn.functional.scaled_dot_product_attention,
  ),
  "one_hot": (torch_compat.one_hot, torch.nn.functional.one_hot),
}


@pytest.mark.parametrize("row", BUILTINS.values(), ids=BUILTINS)
def test_builtin_is_its_public_function(row):
  private, public = row
  assert private is public


def test_undispatched_attention_calls_overrides_of_its_parts():
  seen = []

  class Notes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
      seen.append(func)
      return func(*args, **(kwargs or {}))

  layer = torch.nn.MultiheadAttention(4, 2)
  x = torch.ones(3, 4)
  weights = (layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
  out = (layer.out_proj.weight, layer.out_proj.bias)
  with Notes():
    found, _ = torch_compat.undispatched_attention(x, x, x, 4, 2, *weights, *out)
  assert {torch_compat.linear, torch.nn.functional.softmax} <= set(seen)
  assert torch.nn.functional.multi_head_attention_forward not in seen
  torch.testing.assert_close(found, layer(x, x, x)[0])


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_a_recurrent_builtin_reaches_function_modes(name):
  seen = []

  class Notes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
      seen.append(func)
      return func(*args, **(kwargs or {}))

  layer = {
    "lstm": torch.nn.LSTM,
    "gru": torch.nn.GRU,
    "rnn_tanh": torch.nn.RNN,
    "rnn_relu": functools.partial(torch.nn.RNN, nonlinearity="relu"),
  }[name](2, 3)
  with Notes():
    layer(torch.ones(1, 1, 2))
  assert getattr(torch_compat, name) in seen


# Decompositions -----------------------------------------------------------------------


def test_the_table_of_decompositions_is_keyed_by_overload():
  table = torch_compat.decomposition_table()
  assert callable(table[torch.ops.aten.silu_backward.default])


def test_a_composite_kernel_is_found():
  composite = torch.ops.aten.linear.default
  decompose = torch_compat.composite_decomposition(composite)
  x, weight = torch.ones(2, 3), torch.ones(4, 3)
  assert torch.equal(decompose(x, weight), x @ weight.t())
  assert torch_compat.composite_decomposition(torch.ops.aten.mm.default) is None
  assert torch_compat.composite_decomposition(torch.mm) is None


def test_composite_operations_are_identified():
  aten = torch.ops.aten
  assert torch_compat.is_composite(aten.nll_loss.default)
  assert not torch_compat.is_composite(aten.mm.default)
  # It exists for TorchScript alone.
  assert not torch_compat.is_composite(aten.__and__.bool)
  assert not torch_compat.is_composite(torch.mm)


def test_a_composite_kernel_is_torchs_own():
  kernel = torch_compat.composite_kernel(torch.ops.aten.dropout.default)
  x = torch.ones(50)
  torch.manual_seed(0)
  dropped = kernel(x, 0.5, True)
  torch.manual_seed(0)
  assert torch.equal(dropped, torch.nn.functional.dropout(x))


@pytest.fixture
def notices(monkeypatch):
  """What is noticed of swaps of tensors of the class `Swapped`."""
  monkeypatch.setattr(torch.utils, "swap_tensors", torch.utils.swap_tensors)
  seen = []
  torch_compat.watch_swaps(Swapped, lambda: seen.append(1))
  return seen


class Swapped(torch.Tensor):
  """A class whose swaps are watched."""


def test_swaps_are_noticed(notices):
  first, second = torch.zeros(2).as_subclass(Swapped), torch.ones(2)
  torch.utils.swap_tensors(first, second)
  assert notices == [1] and type(second) is Swapped
  assert torch.equal(first, torch.ones(2)) and type(first) is torch.Tensor
  torch.utils.swap_tensors(first, torch.ones(2))
  assert notices == [1]


def test_module_moves_use_the_watched_swap():
  called = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch.utils, "swap_tensors", lambda *tensors: called.append(tensors))
    patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    torch.nn.Linear(2, 2, bias=False).to(torch.float64)
  assert len(called) == 1


def test_tensor_in_a_graph_is_swapped(notices):
  held = torch.ones(2, requires_grad=True)
  product = (held * held).sum()
  new = torch.zeros(2).as_subclass(Swapped).requires_grad_()
  torch.utils.swap_tensors(held, new)
  assert notices == [1] and held.tolist() == [0, 0] and new.tolist() == [1, 1]
  with pytest.raises(RuntimeError, match="moved to another device"):
    product.backward()


def test_weak_references_keep_their_tensor_after_a_swap(notices):
  held = torch.ones(2, requires_grad=True)
  product, reference = (held * held).sum(), weakref.ref(held)
  new = torch.zeros(2).as_subclass(Swapped).requires_grad_()
  torch.utils.swap_tensors(held, new)
  assert notices == [1] and reference() is held and held.tolist() == [0, 0]
  del new, product
  gc.collect()
  assert reference() is held and type(held) is Swapped
  del held
  gc.collect()
  assert reference() is None


def test_reparametrized_module_uses_the_given_tensors():
  model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
  model[1].weight = model[0].weight
  own = model[0].weight
  other = torch.zeros(2, 2)
  with torch_compat.reparametrized(model, {"0.weight": other}):
    assert model[0].weight is other
    assert model[1].weight is other  # tied weights stay tied
  assert model[0].weight is own and model[1].weight is own


def test_a_kernel_runs_for_factories_without_a_tensor():
  assert_same(torch.ones(2, device="jax"), torch.ones(2))


def test_operations_are_recorded_above_dispatch():
  """Also in a handler, and with a mode on that catches what C++ makes."""
  seen = []

  class Handler(torch_compat.DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
      seen.append(str(func))
      if func is not torch.ops.aten.neg.default:
        return func(*args, **(kwargs or {}))
      with torch_compat.at_top_level(), Handler():
        leaf = args[0].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(leaf.clamp(0.0, 1.0).sum(), leaf)
      return gradient

  with Handler():
    gradient = torch.neg(torch.tensor([0.5, 2.0]))
  assert gradient.tolist() == [1.0, 0.0]
  assert "aten.where.self" in seen and "aten.scalar_tensor.default" in seen


def test_saved_tensors_hooks_are_seen():
  assert not torch_compat.has_saved_tensors_hooks()
  with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
    assert torch_compat.has_saved_tensors_hooks()
  assert not torch_compat.has_saved_tensors_hooks()


def test_foreach_groups_have_the_device_that_python_sees():
  group = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
  first, second = torch.ones(2, device="jax"), torch.ones(3, device="jax")
  other = torch.ones(2, dtype=torch.float16, device="jax")
  groups = group([[first, other, second], [None, None, None]], True)
  assert set(groups) == {
    (torch.device("jax:0"), torch.float32),
    (torch.device("jax:0"), torch.float16),
  }
  lists, indices = groups[torch.device("jax:0"), torch.float32]
  assert indices == [0, 2]
  assert lists[0][0] is first and lists[0][1] is second
  plain = group([[torch.ones(2), torch.ones(2, device="meta")]])
  assert {device.type for device, _ in plain} == {"cpu", "meta"}


def test_optimizers_and_clipping_use_foreach_for_jax_tensors():
  parameters = [torch.nn.Parameter(torch.ones(2, device="jax"))]
  choose = importlib.import_module("torch.optim.optimizer")._default_to_fused_or_foreach
  assert choose(parameters, False) == (False, True)
  supports = torch.utils._foreach_utils._has_foreach_support
  assert supports(parameters, parameters[0].device)
  assert not supports(parameters, torch.device("meta"))


def test_all_packets_of_aten_are_found():
  packets = torch_compat.aten_packets()
  assert torch.ops.aten.add in packets and torch.ops.aten._foreach_add_ in packets
  assert all(packet.overloads() for packet in packets)


def test_a_wrapper_can_be_marked_as_conjugate_and_negative():
  wrapper = torch_compat.make_wrapper(
    Wrapper, (2,), dtype=torch.complex64, device="meta"
  )
  torch_compat.set_conj(wrapper, True)
  torch_compat.set_neg(wrapper, True)
  assert torch.Tensor.is_conj(wrapper) and torch.Tensor.is_neg(wrapper)
  torch_compat.set_conj(wrapper, False)
  assert not torch.Tensor.is_conj(wrapper)


# Autocast -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cast_operation():
  """An operation with a kernel for autocast that notes its calls."""
  library = torch.library.Library("torchax_autocast_test", "DEF")
  library.define("twice(Tensor x) -> Tensor")
  op, calls = torch.ops.torchax_autocast_test.twice.default, []

  def kernel(x):
    calls.append(torch.is_autocast_enabled("jax"))
    with torch_compat.without_autocast():
      calls.append(torch.is_autocast_enabled("jax"))
      return op(x)

  torch_compat.register_autocast_kernel(op, kernel)
  yield op, calls
  # Its own kernels alone: torch drops those of a library with the library.
  del library


@pytest.mark.parametrize(("enabled", "expected"), [(True, [True, False]), (False, [])])
def test_autocast_sees_wrappers(cast_operation, enabled, expected):
  op, calls = cast_operation
  calls.clear()
  made = wrapper()
  with torch.autocast("jax", dtype=torch.bfloat16, enabled=enabled):
    assert torch.equal(op(made), torch.ones(3))
  assert calls == expected


def test_operations_without_autocast_kernel_run_unchanged():
  made = wrapper()
  with torch.autocast("jax", dtype=torch.bfloat16):
    assert torch.equal(torch.abs(made), torch.ones(3))


# Graphs -------------------------------------------------------------------------------


def test_regions_of_a_graph_are_higher_order_operators():
  for name in ("cond", "while_loop", "wrap_with_set_grad_enabled"):
    region = getattr(torch.ops.higher_order, name)
    assert isinstance(region, torch_compat.HigherOrderOperator)
    assert region.name() == name
  assert not isinstance(torch.ops.aten.add.Tensor, torch_compat.HigherOrderOperator)


# torch.compile ------------------------------------------------------------------------


def test_fakes_are_known_and_made_where_a_graph_is_traced():
  seen = []

  def backend(graph, inputs):
    example = torch_compat.to_fake(torch.ones(3))
    seen.append((torch_compat.is_tracing(), torch_compat.is_fake(example)))
    return graph

  torch.compiler.reset()
  torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
  torch.compiler.reset()
  assert seen == [(True, True)]
  plain = torch.ones(3)
  assert not torch_compat.is_tracing()
  assert torch_compat.to_fake(plain) is plain
  assert not torch_compat.is_fake(plain)


def test_in_place_results_are_their_arguments():
  class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
      plain = [x.inner if type(x) is cls else x for x in args]
      result = make(func(*plain, **(kwargs or {})))
      return torch_compat.correct_aliasing(func, args, kwargs or {}, result)

  def make(inner):
    made = torch_compat.make_wrapper(Wrapper, inner.shape, dtype=inner.dtype)
    made.inner = inner
    return made

  tensor = make(torch.ones(3))
  assert tensor.add_(1) is tensor
  assert tensor.inner.tolist() == [2.0] * 3
  assert tensor.add(1) is not tensor


def test_recurrent_layers_are_traced():
  import torch._dynamo

  before = torch._dynamo.config.allow_rnn
  try:
    torch._dynamo.config.allow_rnn = False
    torch_compat.trace_recurrent_layers()
    assert torch._dynamo.config.allow_rnn
  finally:
    torch._dynamo.config.allow_rnn = before


def test_a_compiled_module_has_its_class():
  compiled = torch.compile(torch.nn.ReLU(), backend="eager")
  assert type(compiled) is torch_compat.compiled_module_class()


def inner_function(x):
  return x + 1


def outer_function(x):
  return inner_function(x)


def test_dynamo_skips_functions_kept_from_it():
  graphs = []

  def backend(graph, inputs):
    graphs.append(graph)
    return graph

  torch.compiler.reset()
  torch_compat.keep_from_dynamo(outer_function)
  run = torch.compile(outer_function, backend=backend)
  assert run(torch.ones(2)).tolist() == [2.0, 2.0]
  assert not graphs
  torch.compile(inner_function, backend=backend)(torch.ones(2))
  assert len(graphs) == 1
  torch.compiler.reset()


def test_hooks_are_counted():
  module = torch.nn.ReLU()
  before = torch_compat.count_of_hooks()
  module.register_forward_hook(lambda *args: None)
  assert torch_compat.count_of_hooks() > before


class _Kept:
  """What Dynamo is kept from."""

  @property
  def value(self):
    return outer_function(torch.ones(2))

  @classmethod
  def make(cls):
    return lambda x: outer_function(x)


def test_the_code_of_classes_and_modules_is_found():
  found = {code.co_name for code in torch_compat.graphs._code_of(_Kept)}
  assert found == {"value", "make", "<lambda>"}
  names = {
    code.co_name for code in torch_compat.graphs._code_of(torch_compat.mode_state)
  }
  assert {"is_watched", "ignore_compile_internals"} <= names


def test_fake_tensors_raise_for_their_values():
  error = torch_compat.DataDependentOutputException("Tensor.answer")
  assert isinstance(error, RuntimeError) and error.func == "Tensor.answer"


def test_dynamo_breaks_graphs_at_packages():
  trace_rules = importlib.import_module("torch._dynamo.trace_rules")
  path = importlib.import_module("jax.numpy").__file__
  torch_compat.leave_frames_of("jax")
  assert trace_rules.check_file(path).skipped
  assert not trace_rules.check_file(__file__).skipped


def test_unused_draws_stay_in_graphs():
  found = []

  def backend(graph, inputs):
    def keep(module, inputs):
      found.append([str(node.target) for node in module.graph.nodes])
      return make_boxed_func(module.forward)

    with torch_compat.keep_unused_draws():
      return aot_module_simplified(graph, inputs, fw_compiler=keep)

  torch.compiler.reset()
  torch.compile(lambda x: (torch.rand_like(x), x + 1)[1], backend=backend)(
    torch.ones(2)
  )
  torch.compiler.reset()
  assert any("rand_like" in target for target in found[0])


def test_dispatch_modes_receive_higher_order_operators():
  seen = []

  class Mode(torch_compat.DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
      seen.append(func)
      return func(*args, **(kwargs or {}))

  cond = torch.ops.higher_order.cond
  x = torch.ones(2)
  with Mode():
    (result,) = cond(torch.tensor(True), lambda x: [x + 1], lambda x: [x], (x,))
  assert cond in seen and torch.equal(result, x + 1)


# Functions with gradients -------------------------------------------------------------


class Twice(torch.autograd.Function):
  """Counts nothing, doubles everything."""

  generate_vmap_rule = True

  @staticmethod
  def forward(x):
    return x * 2

  @staticmethod
  def setup_context(ctx, inputs, output):
    pass

  @staticmethod
  def backward(ctx, gradient):
    return gradient * 2


def test_apply_function_equals_apply_under_transforms():
  x = torch.ones(3, requires_grad=True)

  def twice(x):
    return torch_compat.apply_function(Twice, x)

  twice(x).sum().backward()
  assert torch.equal(x.grad, torch.full((3,), 2.0))
  rows = torch.arange(6.0).view(2, 3)
  assert torch.equal(torch.func.vmap(twice)(rows), rows * 2)
  gradient = torch.func.grad(lambda x: twice(x).sum())(torch.ones(3))
  assert torch.equal(gradient, torch.full((3,), 2.0))


def test_holder_is_plain_under_any_mode():
  with torchax.default_env(), torch.device("jax"):
    holder = torch_compat.attribute_holder()
  assert type(holder) is torch.Tensor
  assert holder.device.type == "cpu"


# Transforms of torch.func ------------------------------------------------------------


def test_innermost_unwraps_transforms():
  x, found = torch.ones(2, 3), []

  def note(row):
    found.append((row, torch_compat.innermost(row)))
    return row.sum()

  torch.func.vmap(torch.func.grad(note))(x)
  ((wrapped, inner),) = found
  assert wrapped.shape == (3,) and inner is not wrapped and inner.shape == (2, 3)
  assert torch_compat.innermost(x) is x


# torch.distributed --------------------------------------------------------------------


def _decorated(function):
  @functools.wraps(function)
  def around(*args, **kwargs):
    return ("around", function(*args, **kwargs))

  return around


def test_rerouted_function_keeps_its_identity():
  def add(x, y=1, *, z=2):
    """Adds."""
    return x + y + z

  decorated = _decorated(add)
  signature, calls = inspect.signature(decorated), []

  def instead(original, *args, **kwargs):
    calls.append((args, kwargs))
    return original(*args, **kwargs) if args[0] else "ours"

  for _ in range(2):  # the second time changes nothing
    torch_compat.reroute(decorated, instead)
  assert decorated(1) == ("around", 4) and decorated(1, 2, z=5) == ("around", 8)
  assert decorated(0, z=5) == ("around", "ours")
  assert calls == [((1,), {}), ((1, 2), {"z": 5}), ((0,), {"z": 5})]
  assert inspect.signature(decorated) == signature and add.__doc__ == "Adds."
  with pytest.raises(TypeError):
    decorated(1, unknown=1)


def test_a_rerouted_method_stays_static_or_bound():
  class Counter:
    def bound(self, x):
      return (type(self).__name__, x)

    @staticmethod
    def static(x):
      return x

  for name in ("bound", "static"):
    for _ in range(2):
      torch_compat.reroute_method(
        Counter, name, lambda original, *args: [original(*args)]
      )
  assert Counter().bound(1) == [("Counter", 1)]
  assert Counter().static(1) == Counter.static(1) == [1]


@pytest.mark.parametrize(
  "path",
  [
    "torch.distributed.init_process_group",
    "torch.distributed.tensor.distribute_tensor",
    "torch.distributed.tensor.distribute_module",
    "torch.distributed.tensor._api._dtensor_init_helper",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed._functional_collectives.permute_tensor",
    "torch.distributed._functional_collectives._maybe_wrap_tensor",
  ],
)
def test_rerouted_functions_have_no_closure(path):
  assert not inspect.unwrap(torch_compat.function_of(path)).__closure__


def test_a_mesh_can_be_made_without_communicators():
  from torch.distributed.device_mesh import DeviceMesh

  original = DeviceMesh.__init__
  original = getattr(original, "_torchax_original", original)
  names = {*torch_compat.options_of_mesh(original, {"mesh_dim_names": ("x",)}, 3)[0]}
  assert {"mesh_dim_names", "_init_backend", "_rank"} == names
  assert torch_compat.current_mesh() is None
  assert torch_compat.group_by_name("no group has this name") is None
