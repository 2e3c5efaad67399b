"""Tables of patching: effects of heads or paths on the difference between the logits of two answers."""

from dataclasses import replace

from headwise.errors import InputError
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow
from headwise.settings import PATCH_DIRECTIONS
from headwise.statistics.columns import Column


class Patching(HeadTable[HeadRow]):
    """Table of the effect of patching each head, one row per head, as means over prompt pairs. `difference` is the
    logit of the right answer minus that of the wrong one in the patched run. `recovered` is the place of `difference`
    on a scale from 0 (`difference` in the corrupted run) to 1 (`difference` in the clean run).
    """

    NAME = "patching"
    ROW_TYPE = HeadRow
    COLUMNS = (
        Column("recovered", "Place of the difference between its values in both runs.", is_signed=True, is_tested=True),
        Column("difference", "Logit of the right answer minus that of the wrong one.", "logit", is_signed=True),
    )
    SAMPLES = "prompt pair"

    def column(self, name: str) -> Column:
        """Return the description of a statistic. If patching a head changes nothing, its value is that of the corrupted
        run for the direction "denoise" (0 for `recovered`), and that of the clean run for "noise" (1 for `recovered`).
        """
        is_noise = self.metadata.get("settings", {}).get("direction") == "noise"
        null = float(is_noise)
        if name == "difference":
            null = float(self.metadata["measured"]["clean" if is_noise else "corrupted"])
        return replace(super().column(name), null=null)


class AttributionPatching(Patching):
    """Table of the estimated effect of patching each head, one row per head, from derivatives. Its columns have the
    definitions of activation patching, with an estimate in place of the difference in the patched run.

    With d the logit of the right answer minus that of the wrong one, o the output of the head in the run that is
    patched, and o' its output in the other run, each pair of prompts has

        difference  d + sum over tokens and features of (o' - o) * dd/do
        recovered   (difference - d_corrupted) / (d_clean - d_corrupted)

    (Nanda 2023, "Attribution patching"; Syed, Rager and Conmy 2023). dd/do includes the effect through later layers.

    With `steps`, dd/do is averaged over the straight line from o to o' by Gauss-Legendre quadrature (integrated
    gradients; Sundararajan, Taly and Yan 2017, equation 1). All heads of a layer move along their lines together, one
    layer at a time, while everything after them is computed as usual. The effects of the heads of a layer then add up
    to the effect of patching all of them at once, up to the error of the quadrature.
    `metadata["measured"]["completeness_gap"]` is the largest absolute deviation from this, over layers and prompt
    pairs, in the unit of `difference`. In a layer with one head, the estimate is the result of activation patching.
    """

    NAME = "attribution_patching"


class PathPatching(Patching):
    """Table of the effect of patching the direct paths from each sender head to the receivers, one row per sender. Its
    columns have the definitions of activation patching, where only these paths are patched.

    The steps are those of Wang et al. (2022, appendix B, algorithm 1):

    1. Run the model on both batches, and record the outputs of all heads.
    2. Run it on the batch that is patched, with the output of the sender from the other run, and all other heads frozen
       at their outputs in the unpatched run. Norms and MLPs are computed again.
    3. Record what the receivers get in this run. If these are the logits, their difference is the result.
    4. Run the model on the batch that is patched, with these inputs of the receivers, and everything after the
       receivers computed as usual.

    Wang et al. compute MLPs again along the paths (`mlps="recompute"`), and patch from other prompts into the run that
    answers correctly (`direction="noise"`). With `mlps="freeze"`, MLPs are frozen in step 2, too, so that paths lead
    through the residual stream alone. A sender that no path connects to a receiver, such as one in a later layer, has
    no effect: `recovered` is exactly 0 for "denoise" and 1 for "noise".
    """

    NAME = "path_patching"


def require_direction(direction: object) -> None:
    """Raise `InputError` if a direction of patching is neither "denoise" nor "noise"."""
    if direction not in PATCH_DIRECTIONS:
        raise InputError("direction", expected=" or ".join(map(repr, PATCH_DIRECTIONS)), got=repr(direction))
