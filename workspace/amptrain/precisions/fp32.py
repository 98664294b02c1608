"""FP32 without TF32."""

from amptrain.precision import Precision


class Fp32(Precision):
    """True FP32."""

    name = "fp32"
