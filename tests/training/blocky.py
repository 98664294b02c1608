"""Models of blocks, as --model takes them, for test_fsdp.py."""

from torch import Tensor, nn


class Block(nn.Module):
    """Of odd width, so that the ranks' parts are not equal."""

    def __init__(self, width: int, norm: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 70), nn.Linear(70, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.down(nn.functional.gelu(self.up(self.norm(values))))
        return values + self.dropout(added)


def blocky(
    num_classes: int, norm: type[nn.Module] = nn.LayerNorm, dropout: float = 0.1
) -> nn.Module:
    blocks = [Block(33, norm, dropout) for _ in range(2)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 33), *blocks, nn.Linear(33, num_classes))


def without_dropout(num_classes: int) -> nn.Module:
    return blocky(num_classes, dropout=0.0)


def with_batch_norm(num_classes: int) -> nn.Module:
    return blocky(num_classes, nn.BatchNorm1d)
