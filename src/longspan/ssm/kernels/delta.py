"""Gated delta rules of one decay a head, by the kernels of flash-linear-attention."""

from torch import Tensor

from longspan.ssm.kernels.call import Inputs, Recurrence, SavedScan
from longspan.ssm.kernels.delta_states import DeltaGradients, DeltaStates, compute_chunk_states
from longspan.ssm.kernels.packages import add_batch_dim, chunk_cumsum, fla_function, fla_lack, match_inputs, run_indices
from longspan.ssm.kernels.pieces import cut_into_pieces
from longspan.ssm.kernels.runs import CHUNK, LocalRuns


def kimi_lack(recurrence: Recurrence) -> str:
    """Return what a recurrence would need to be run by Kimi's kernels, for an error; "" if they can run it."""
    if not recurrence.delta or not recurrence.by_channel:
        return "a delta rule of a decay for each key number"
    return fla_lack(recurrence.dtype, recurrence.device, recurrence.key_size, recurrence.value_size)


class KimiForward:
    """A forward pass of Kimi's delta rule, with a decay for each key number; see `Forward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        """Compute what does not depend on the entering states: products inside chunks, and the map of each run."""
        pieces = cut_into_pieces(runs, inputs.state_shape[0])
        self._runs, self._scale = pieces.runs, scale
        self._q, k, v, _, beta = add_batch_dim(inputs)
        self._g = chunk_cumsum(inputs.g, self._runs)
        chunk_kernel = fla_function("ops.kda.chunk_intra", "chunk_kda_fwd_intra")
        arguments = {"q": self._q, "k": k, "v": v, "gk": self._g, "beta": beta, "scale": scale}
        # w and u as in `delta_states`; kg: keys decayed to the chunk's end; qk, kk: matrices of a chunk's row pairs.
        w, u, _, kg, self._qk, kk = chunk_kernel(**arguments, chunk_size=CHUNK, **run_indices(self._runs))
        self._states = DeltaStates({"k": kg, "w": w, "u": u, "gk": self._g}, pieces)
        self.summaries = self._states.summaries
        self.activations = (self._g, self._qk, kk, self._states.transitions)

    def outputs(self, states: Tensor) -> Tensor:
        """Return the outputs (T, H, V) from the states (R, H, K, V) that enter the runs."""
        h, new_values, entering = self._states.chunk_states(states)
        self.activations = (*self.activations, entering)
        arguments = {"q": self._q, "v": new_values, "g": self._g, "A": self._qk, "h": h, "scale": self._scale}
        compute_outputs = fla_function("ops.gla.chunk", "chunk_gla_fwd_o_gk")
        return compute_outputs(**arguments, chunk_size=CHUNK, **run_indices(self._runs)).squeeze(0)


class KimiBackward:
    """A backward pass of Kimi's delta rule; see `Backward`.

    Its kernels work out the states of chunks themselves, after the exchange.
    """

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float, saved: SavedScan) -> None:
        """Compute again what the forward pass did not keep, and the gradients inside chunks."""
        pieces = cut_into_pieces(runs, inputs.state_shape[0])
        self._inputs, self._runs, self._scale = inputs, pieces.runs, scale
        self._g, self._qk, self._kk, transitions, self._entering = saved.activations
        self._do = saved.dout.to(inputs.v.dtype).contiguous().unsqueeze(0)
        q, k, v, _, beta = add_batch_dim(inputs)
        indices = run_indices(self._runs)
        recompute = fla_function("ops.kda.wy_fast", "recompute_w_u_fwd")
        # qg: queries decayed from the chunk's start, kg: keys decayed to its end.
        w, _, qg, kg = recompute(q=q, k=k, v=v, beta=beta, A=self._kk, gk=self._g, **indices)
        chunk_kernel = fla_function("ops.kda.chunk_bwd", "chunk_kda_bwd_dAv")
        _, dv = chunk_kernel(q=q, k=k, v=v, do=self._do, A=self._qk, scale=scale, chunk_size=CHUNK, **indices)
        rows = {"q": qg, "k": kg, "w": w, "gk": self._g, "do": self._do, "dv": dv}
        self._states = DeltaGradients(rows, pieces, transitions, scale)
        self.entry_gradients = self._states.entry_gradients

    def prepare_chunks(self) -> None:
        """Do nothing during the exchange: `gradients` computes the states of chunks too."""

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, g and beta, from those (R, H, K, V) at final states."""
        q, k, v, _, beta = add_batch_dim(self._inputs)
        dq, dk, dv, dbeta, dg, *_ = fla_function("ops.kda.chunk_bwd", "chunk_kda_bwd")(
            q=q,
            k=k,
            v=v,
            beta=beta,
            Aqk=self._qk,
            Akk=self._kk,
            scale=self._scale,
            initial_state=self._entering,
            do=self._do,
            dht=self._states.leaving_gradients(leaving),
            g=self._g,
            chunk_size=CHUNK,
            **run_indices(self._runs),
        )
        return match_inputs((dq, dk, dv, dg, dbeta), self._inputs)


_WY = "ops.gated_delta_rule.wy_fast"


def delta_lack(recurrence: Recurrence) -> str:
    """Return what a recurrence would need to be run by fla's gated delta rule, for an error; "" if it can run it."""
    if not recurrence.delta or recurrence.by_channel:
        return "a delta rule of one decay a head"
    return fla_lack(recurrence.dtype, recurrence.device, recurrence.key_size, recurrence.value_size)


class DeltaForward:
    """A forward pass of the gated delta rule, with one decay a head; see `Forward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        """Compute what does not depend on the entering states: products inside chunks, and the map of each run.

        Long runs are cut into pieces, which are scanned side by side (`pieces.py`); `_runs` are these. `activations`
        are what backward needs besides the inputs and the states.
        """
        pieces = cut_into_pieces(runs, inputs.state_shape[0])
        self._runs, self._scale = pieces.runs, scale
        self._q, self._k, v, _, beta = add_batch_dim(inputs)
        self._g = chunk_cumsum(inputs.g.squeeze(-1), self._runs)
        chunk_kernel = fla_function("ops.gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_intra")
        # a: the inverse of a matrix of each chunk's pairs of rows; w and u: a and beta times decayed keys, and values.
        w, u, a = chunk_kernel(k=self._k, v=v, g=self._g, beta=beta, chunk_size=CHUNK, **run_indices(self._runs))
        self._states = DeltaStates({"k": self._k, "w": w, "u": u, "g": self._g}, pieces)
        self.summaries = self._states.summaries
        self.activations = (self._g, a, self._states.transitions)

    def outputs(self, states: Tensor) -> Tensor:
        """Return the outputs (T, H, V) from the states (R, H, K, V) that enter the runs."""
        h, new_values, entering = self._states.chunk_states(states)
        self.activations = (*self.activations, entering)
        arguments = {"q": self._q, "k": self._k, "v": new_values, "h": h, "g": self._g, "scale": self._scale}
        return fla_function("ops.common.chunk_o", "chunk_fwd_o")(
            **arguments, chunk_size=CHUNK, **run_indices(self._runs)
        ).squeeze(0)


class DeltaBackward:
    """A backward pass of the gated delta rule; see `Backward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float, saved: SavedScan) -> None:
        """Compute what backward reads again: the products u and w of each chunk, and the gradients inside chunks."""
        pieces = cut_into_pieces(runs, inputs.state_shape[0])
        self._inputs, self._runs, self._scale = inputs, pieces.runs, scale
        self._g, self._a, transitions, self._entering = saved.activations
        self._q, self._k, self._v, _, self._beta = add_batch_dim(inputs)
        indices = run_indices(self._runs)
        recompute = fla_function(_WY, "recompute_w_u_fwd")
        self._w, self._u = recompute(k=self._k, v=self._v, beta=self._beta, A=self._a, g=self._g, **indices)
        self._do = saved.dout.to(inputs.v.dtype).contiguous().unsqueeze(0)
        self._shared_rows = {"q": self._q, "k": self._k, "g": self._g, "do": self._do}
        chunk_kernel = fla_function("ops.common.chunk_o", "chunk_bwd_dv_local")
        dv = chunk_kernel(**self._shared_rows, scale=scale, chunk_size=CHUNK, **indices)
        self._states = DeltaGradients({**self._shared_rows, "w": self._w, "dv": dv}, pieces, transitions, scale)
        self.entry_gradients = self._states.entry_gradients
        self._h = self._new_values = inputs.v[:0]  # results of `compute_chunk_states`, once `prepare_chunks` has run

    def prepare_chunks(self) -> None:
        """Compute once more, while gradients travel, the states of chunks, which forward did not keep."""
        rows = {"k": self._k, "w": self._w, "u": self._u, "g": self._g}
        self._h, self._new_values = compute_chunk_states(rows, self._entering, self._runs)

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, g and beta, from those (R, H, K, V) at final states.

        Those of k and g have two parts: from the outputs, and from the products u and w of each chunk (WY).
        """
        dh, dv = self._states.chunk_gradients(self._entering, self._states.leaving_gradients(leaving))
        indices = run_indices(self._runs)
        arguments = {**self._shared_rows, "v": self._new_values, "w": self._w, "h": self._h, "dv": dv, "dh": dh}
        compute_gradients = fla_function("ops.common.chunk_o", "chunk_bwd_dqkwg")
        dq, dk_outputs, dw, dg_outputs = compute_gradients(**arguments, scale=self._scale, chunk_size=CHUNK, **indices)
        # dv as du: rows add the values u − w S, so that u has their gradient.
        arguments = {"k": self._k, "v": self._v, "beta": self._beta, "g": self._g, "A": self._a, "dw": dw, "du": dv}
        dk_wy, dv, dbeta, dg_wy = fla_function(_WY, "prepare_wy_repr_bwd")(**arguments, **indices)
        dg = chunk_cumsum((dg_outputs + dg_wy).squeeze(0), self._runs, reverse=True).unsqueeze(-1)
        return match_inputs((dq, dk_outputs + dk_wy, dv, dg, dbeta), self._inputs)
