"""The dimension key and one alias per kind of array. Nothing else in the project repeats the key.

    B  slots                   D  model width               J  DeltaNet key heads
    T  tokens this call        V  vocabulary                P  DeltaNet key dim
    S  positions in a page     E  routed experts            W  DeltaNet value heads
    M  pages of a slot         A  experts per token         R  DeltaNet value dim
    U  draft tokens            F  expert hidden width       C  conv channels
    O  rounds per decode call  Z  flattened tokens, B * T   X  conv taps kept (kernel - 1)
    N  query heads             K  key/value heads           G  query heads per key/value head, N // K
    H  attention head dim      Q  rotated half, rotary dim // 2

Names inside function bodies carry their dimensions as a suffix (`x_BTD`, `state_BWPR`), and einsum
strings use the same letters. Public signatures carry the aliases below; beartype checks them in tests.
"""

from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from model.quantization import QuantizedWeight

TokensBT = Int[Array, "B T"]
PositionsBT = Int[Array, "B T"]
MaskBT = Bool[Array, "B T"]
Positions3BT = Int[Array, "3 B T"]
PerSlotInt = Int[Array, "B"]
PerSlotFloat = Float[Array, "B"]
PerSlotBool = Bool[Array, "B"]
Seeds = UInt32[Array, "Z"]
PageTable = Int[Array, "B M"]

Hidden = Float[Array, "B T D"]
HiddenRows = Float[Array, "Z D"]
Logits = Float[Array, "Z V"]
RotaryBTQ = Float[Array, "B T Q"]

Queries = Float[Array, "B T N H"]
KeysValues = Float[Array, "B T K H"]
KVPages = Num[Array, "pages K S H"]

DeltaQK = Float[Array, "B T J P"]
DeltaV = Float[Array, "B T W R"]
DeltaGate = Float[Array, "B T W"]
RecurrentState = Float[Array, "B W P R"]
ConvWindow = Float[Array, "B XT C"]

ExpertIds = Int[Array, "Z A"]
ExpertWeights = Float[Array, "Z A"]
GateUpWeights = Float[Array, "E F2 D"] | QuantizedWeight
DownWeights = Float[Array, "E D F"] | QuantizedWeight
