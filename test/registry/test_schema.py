"""Properties of torch's schemas: functional variants, writes, views, randomness."""

import pytest
import torch

from torchax.registry.schema import functional_form, is_in_place, schema_of

aten = torch.ops.aten

FUNCTIONAL = {
  aten.add_.Tensor: aten.add.Tensor,
  aten.add.out: aten.add.Tensor,
  aten.add_.Scalar: aten.add.Scalar,
  aten.relu_.default: aten.relu.default,
  aten.clamp_.default: aten.clamp.default,
  aten.index_put_.default: aten.index_put.default,
  aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
  aten.cumsum.out: aten.cumsum.default,
  aten.max.dim_max: aten.max.dim,
  aten.topk.values: aten.topk.default,
  aten.t_.default: aten.t.default,
  aten.squeeze_.dims: aten.squeeze.dims,
  aten.copy_.default: aten.copy.default,
  aten.fill_.Tensor: aten.fill.Tensor,
  aten.normal_.default: aten.normal_functional.default,
  aten.bernoulli_.float: aten.bernoulli.p,
  aten.uniform_.default: aten.uniform.default,
  aten.zero_.default: aten.zeros_like.default,
  aten.ones.out: aten.ones.default,
  aten.arange.start_out: aten.arange.start_step,
}


@pytest.mark.parametrize("op", FUNCTIONAL, ids=str)
def test_the_functional_form_follows_from_the_schema(op):
  assert functional_form(op) is FUNCTIONAL[op]


def test_functional_form_is_none_if_torch_lacks_it():
  assert functional_form(aten.resize_as_.default) is None


WRITTEN = {
  aten.add_.Tensor: ("self",),
  aten.add.out: ("out",),
  aten.max.dim_max: ("max", "max_values"),
  aten.add.Tensor: (),
  aten.batch_norm_update_stats.default: (),
  aten._native_batch_norm_legit.default: ("running_mean", "running_var"),
  aten.view.default: (),
}


@pytest.mark.parametrize("op", WRITTEN, ids=str)
def test_written_arguments_are_known(op):
  assert schema_of(op).written == WRITTEN[op]


IN_PLACE = {
  aten.add_.Tensor: True,
  aten.add.out: False,
  aten.add.Tensor: False,
  aten.view.default: False,
}


@pytest.mark.parametrize("op", IN_PLACE, ids=str)
def test_an_in_place_form_writes_its_first_argument(op):
  assert is_in_place(op) is IN_PLACE[op]


VIEWS = {
  aten.view.default: True,
  aten.slice.Tensor: True,
  aten.split.Tensor: True,
  aten.detach.default: True,
  aten.t_.default: False,
  aten.add.Tensor: False,
  aten.clone.default: False,
}


@pytest.mark.parametrize("op", VIEWS, ids=str)
def test_a_view_aliases_without_writing(op):
  assert schema_of(op).is_view is VIEWS[op]


RANDOM = {
  aten.rand.default: True,
  aten.native_dropout.default: True,
  aten.uniform_.default: True,
  aten.add.Tensor: False,
}


@pytest.mark.parametrize("op", RANDOM, ids=str)
def test_a_random_operation_is_known_by_its_tag(op):
  assert schema_of(op).is_random is RANDOM[op]


DYNAMIC = {
  aten.add.Tensor: {"self", "other", "alpha"},
  aten.clamp.default: {"self", "min", "max"},
  aten.cat.default: {"tensors"},
  aten.sum.dim_IntList: {"self"},
  aten.native_dropout.default: {"input", "p"},
  aten.native_layer_norm.default: {"input", "weight", "bias", "eps"},
  aten.view.default: {"self"},
}


@pytest.mark.parametrize("op", DYNAMIC, ids=str)
def test_tensors_and_numbers_are_dynamic_shapes_and_flags_static(op):
  assert schema_of(op).dynamic == DYNAMIC[op]


def test_names_are_in_the_order_of_the_schema():
  assert schema_of(aten.add.Tensor).names == ("self", "other", "alpha")
