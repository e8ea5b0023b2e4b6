"""Delta rules with a decay for each key number (Kimi's delta attention), by kernels of flash-linear-attention."""

from torch import Tensor

from longspan.ssm.kernels import fla
from longspan.ssm.kernels.call import Inputs, Recurrence, Saved
from longspan.ssm.kernels.delta.pieces import pieces_of
from longspan.ssm.kernels.delta.states import DeltaGradients, DeltaStates
from longspan.ssm.kernels.fla_calls import batch_of_one, cumulative, indices, of_inputs
from longspan.ssm.kernels.runs import CHUNK, LocalRuns


def lacks(recurrence: Recurrence) -> str:
    """What it would need; "" for nothing."""
    if not recurrence.delta or not recurrence.by_channel:
        return "a delta rule of a decay for each key number"
    return fla.lacks(recurrence.dtype, recurrence.device, recurrence.key_size, recurrence.value_size)


class KimiForward:
    """A forward pass; see `Forward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        pieces = pieces_of(runs, inputs.state_shape[0])
        self._runs, self._scale = pieces.runs, scale
        self._q, k, v, _, beta = batch_of_one(inputs)
        self._g = cumulative(inputs.g, self._runs)
        inside = fla.function("ops.kda.chunk_intra", "chunk_kda_fwd_intra")
        given = {"q": self._q, "k": k, "v": v, "gk": self._g, "beta": beta, "scale": scale}
        w, u, _, kg, self._qk, kk = inside(**given, chunk_size=CHUNK, **indices(self._runs))
        self._states = DeltaStates({"k": kg, "w": w, "u": u, "gk": self._g}, pieces)
        self.summaries = self._states.summaries
        self.kept = (self._g, self._qk, kk, self._states.transitions)

    def outputs(self, states: Tensor) -> Tensor:
        """See `Forward`."""
        h, new, entering = self._states.of_chunks(states)
        self.kept = (*self.kept, entering)
        given = {"q": self._q, "v": new, "g": self._g, "A": self._qk, "h": h, "scale": self._scale}
        out = fla.function("ops.gla.chunk", "chunk_gla_fwd_o_gk")
        return out(**given, chunk_size=CHUNK, **indices(self._runs)).squeeze(0)


class KimiBackward:
    """A backward pass; see `Backward`. Its kernels work out the states of chunks themselves, after the exchange."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float, saved: Saved) -> None:
        pieces = pieces_of(runs, inputs.state_shape[0])
        self._inputs, self._runs, self._scale = inputs, pieces.runs, scale
        self._g, self._qk, self._kk, transitions, self._entering = saved.kept
        self._do = saved.dout.to(inputs.v.dtype).contiguous().unsqueeze(0)
        q, k, v, _, beta = batch_of_one(inputs)
        at = indices(self._runs)
        again = fla.function("ops.kda.wy_fast", "recompute_w_u_fwd")
        w, _, qg, kg = again(q=q, k=k, v=v, beta=beta, A=self._kk, gk=self._g, **at)
        inside = fla.function("ops.kda.chunk_bwd", "chunk_kda_bwd_dAv")
        _, dv = inside(q=q, k=k, v=v, do=self._do, A=self._qk, scale=scale, chunk_size=CHUNK, **at)
        rows = {"q": qg, "k": kg, "w": w, "gk": self._g, "do": self._do, "dv": dv}
        self._states = DeltaGradients(rows, pieces, transitions, scale)
        self.owed = self._states.owed

    def prepare(self) -> None:
        """Nothing apart."""

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """See `Backward`."""
        q, k, v, _, beta = batch_of_one(self._inputs)
        dq, dk, dv, dbeta, dg, *_ = fla.function("ops.kda.chunk_bwd", "chunk_kda_bwd")(
            q=q,
            k=k,
            v=v,
            beta=beta,
            Aqk=self._qk,
            Akk=self._kk,
            scale=self._scale,
            initial_state=self._entering,
            do=self._do,
            dht=self._states.leaving(leaving),
            g=self._g,
            chunk_size=CHUNK,
            **indices(self._runs),
        )
        return of_inputs((dq, dk, dv, dg, dbeta), self._inputs)
