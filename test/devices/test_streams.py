"""Streams and events of `torch.jax`."""

import pytest
import torch


def test_there_is_one_stream():
  stream = torch.accelerator.current_stream()
  assert isinstance(stream, torch.Stream) and stream.device == torch.device("jax:0")
  assert stream == torch.jax.default_stream() == torch.jax.Stream(priority=-1)
  with torch.jax.stream(torch.jax.Stream()), torch.jax.Stream():
    work = torch.ones(300, 300, device="jax") @ torch.ones(300, 300, device="jax")
  stream.wait_stream(torch.jax.Stream())
  stream.synchronize()
  assert work.jax().is_ready() and stream.query() and not stream.is_capturing()
  torch.accelerator.set_stream(stream)


def test_events_measure_elapsed_time_of_the_work_between():
  a = torch.ones(700, 700, device="jax")
  start, end = (torch.jax.Event(enable_timing=True) for _ in range(2))
  start.record()
  product = a @ a
  torch.jax.current_stream().record_event(end)
  assert product.jax().is_ready()
  assert 0 < start.elapsed_time(end) < 60_000
  end.synchronize()
  assert end.query() and isinstance(end, torch.Event)


def test_stream_created_by_torch_does_not_wait():
  stream, ours = torch.Stream("jax"), torch.jax.current_stream()
  with stream:
    work = torch.ones(2, device="jax") + 1
  stream.wait_stream(ours)
  ours.wait_stream(stream)
  stream.wait_event(torch.jax.Event())
  ours.wait_event(stream.record_event())
  stream.synchronize()
  assert stream.query() and stream.device == torch.device("jax:0")
  assert isinstance(stream, torch.Stream) and work.tolist() == [2.0, 2.0]


def test_event_created_by_torch_is_not_waited_for():
  event = torch.Event("jax")
  torch.jax.current_stream().record_event(event)
  assert event.query()
  with pytest.raises(RuntimeError, match="doesn't support synchronizing events"):
    event.synchronize()


def test_elapsed_time_of_untimed_event_raises():
  untimed, timed = torch.jax.Event(), torch.jax.Event(enable_timing=True)
  with pytest.raises(RuntimeError, match="enable_timing=True"):
    untimed.elapsed_time(timed)
  with pytest.raises(RuntimeError, match="record"):
    timed.elapsed_time(torch.jax.Event(enable_timing=True))
  untimed.record()
  untimed.synchronize()
  assert untimed.query()
