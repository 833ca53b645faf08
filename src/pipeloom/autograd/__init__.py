"""What the backward of any module computes, and what it keeps for that.

split_backward       the two halves of a backward: I, gradients of inputs, and W, gradients of weights
auxiliary_losses     losses and quantities that a model declares inside its forward
loss_metrics         metrics that a loss_fn returns beside the loss
deferred_gradients   which weight gradients wait for W
fp8_linear           linear layers that multiply in 8 bits
weight_products      the formulas by which W computes them
recomputation        activation recomputation
saved_bytes          counts what autograd saves
"""

from pipeloom.autograd.auxiliary_losses import Collected, DeclaredLoss, auxiliary_loss, auxiliary_losses, observe
from pipeloom.autograd.fp8_linear import use_fp8
from pipeloom.autograd.loss_metrics import Mean, Sum

__all__ = ["Collected", "DeclaredLoss", "Mean", "Sum", "auxiliary_loss", "auxiliary_losses", "observe", "use_fp8"]
