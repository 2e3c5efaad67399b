"""Attention outputs, or parts of them, that a model adds or joins in one tensor before it projects them: they share
columns of the output projection, or are heads computed one after the other.
"""

from itertools import combinations

from torch import Tensor

from headwise.intercept.attention_output import AttentionOutput
from headwise.intercept.axes import OTHER
from headwise.intercept.contractions import PRODUCTS
from headwise.intercept.element_places import ASSIGNMENT
from headwise.intercept.function_call import FunctionCall
from headwise.intercept.output_use import STACKS, FollowedOutput, concatenates, features_of, is_part, sums_stack
from headwise.intercept.refusals import ADDED, HEADS_SEPARATE, HEADS_UNKNOWN
from headwise.intercept.score_products import CONCATENATIONS
from headwise.intercept.session import current_session


def refuse_added(call: FunctionCall, arguments: list[tuple[Tensor, FollowedOutput]]) -> None:
    """Exclude attention outputs from the results if a function call adds them to each other, or selects elements from
    several of them, before the output projection. Their heads then share columns of the projection, so that no head can
    be observed alone. The same rule applies to parts of one output.

    Args:
        call: the call.
        arguments: arguments of the call that were computed from attention outputs.
    """
    is_in_parts = call.function in ASSIGNMENT and all(
        each.is_written and any(factor.axis == OTHER for factors in each.axes for factor in factors)
        for tensor, each in arguments
        if tensor is call.args[0]
    )
    are_apart = is_in_parts or call.function in CONCATENATIONS | STACKS | PRODUCTS
    for (tensor, followed), (other_tensor, other) in combinations(arguments, 2):
        is_projected = followed.output.is_projected or other.output.is_projected
        if tensor is other_tensor:
            are_added = not is_projected and sums_stack(call, tensor, followed)
        else:
            is_same = followed.output is other.output
            are_parts = is_same and not is_projected and (is_part(followed) or is_part(other))
            are_added = not are_apart and (are_parts or followed.output.is_other_softmax_of(other.output))
        if are_added:
            followed.output.refuse(ADDED)
            other.output.refuse(ADDED)


def refuse_concatenated_heads(call: FunctionCall) -> None:
    """Exclude attention outputs from the results if a function call concatenates them as features and each may be a
    single head or a group of heads. That may be so if they are parts of one output, or outputs of several attention
    calls in one module call. Also exclude an output that was already reported if parts of it are concatenated along its
    heads, since the order of the heads may then change.
    """
    outputs: list[AttentionOutput] = []
    reported: list[tuple[AttentionOutput, bool]] = []
    for tensor in call.tensors:
        for followed in current_session().attention.outputs.get(tensor) or ():
            output = followed.output
            if output.axis_of_heads is not None:
                joins_heads = concatenates(call, tensor, followed, output.axis_of_heads)
                if any(each is output and (joins_heads or other) for each, other in reported):
                    output.refuse(HEADS_UNKNOWN)
                reported.append((output, joins_heads))
            if output.is_reported or features_of(call, tensor, followed) is None:
                continue
            others = [each for each in outputs if each is output or output.is_other_head_of(each, as_features=True)]
            for each in [output, *others] if others else ():
                each.refuse(HEADS_SEPARATE)
            outputs.append(output)
