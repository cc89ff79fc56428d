"""The digest kernel has the lanes of its NumPy twin, for every width, alignment and shape."""

import pytest
import torch

from tp_invariant_recipes.kernels import grad_norm
from tp_invariant_recipes.kernels.digest import COLUMNS, ROWS, Lanes, lanes
from tp_invariant_recipes.kernels.launch import TensorPart

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64, torch.int64)
SHAPES = (
    (1, 1), (1, COLUMNS), (3, COLUMNS + 1), (ROWS, 7), (ROWS + 1, 4), (2 * ROWS + 3, 2 * COLUMNS + 5), (0, 8),
    (8, 0),
)  # fmt: skip


def filled(shape, dtype):
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (shape[0] * shape[1] * size,), dtype=torch.uint8).view(dtype).view(shape)


def on_gpu(piece):
    return piece._replace(values=piece.values.cuda())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_and_twin_agree(dtype):
    torch.manual_seed(0)
    pieces = [TensorPart(filled(shape, dtype), 5 * n, 3 * n, 1 + n % 3) for n, shape in enumerate(SHAPES)]
    assert torch.equal(lanes([on_gpu(piece) for piece in pieces]).cpu(), lanes(pieces))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shift", (1, 2, 3, 7))
def test_unaligned_and_strided_pieces(dtype, shift):
    torch.manual_seed(shift)
    whole = filled((70, 3000), dtype)
    views = lambda t: [TensorPart(t[shift::2, shift : shift + 2001], shift, shift, 2), TensorPart(t[:, :1], 0, 0)]  # noqa: E731
    assert torch.equal(lanes(views(whole.cuda())).cpu(), lanes(views(whole)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_largest_magnitude_is_that_of_the_gradient_norm(dtype):
    torch.manual_seed(0)
    pieces = [TensorPart(filled(shape, dtype).nan_to_num(), 0, 0) for shape in SHAPES]
    taken = Lanes([on_gpu(piece) for piece in pieces], magnitude=True)
    assert torch.equal(taken().cpu(), lanes(pieces))
    assert taken.largest.item() == grad_norm.largest([piece.values for piece in pieces]).item() > 0


def test_a_rank_without_pieces_has_its_lanes_on_the_gpu():
    taken = Lanes([], magnitude=True, device=torch.device("cuda"))
    assert taken().shape == (0, 2)
    assert taken().is_cuda
    assert (taken.largest.is_cuda, taken.largest.item(), taken.unlike.is_cuda) == (True, 0, True)


def test_copies_that_do_not_follow_are_counted():
    """Ties, NaNs, infinities; copies that are rows of a wider table; pieces without a copy beside them."""
    torch.manual_seed(0)
    pieces, wrong = [], []
    for n, shape in enumerate(SHAPES):
        values = filled(shape, torch.float32)
        flat = values.view(-1).view(torch.int32)
        flat[::3] = flat[::3] & ~0xFFFF | 0x8000
        copy = torch.empty(shape[0], shape[1] + n, dtype=torch.bfloat16)[:, : shape[1]]
        copy.copy_(values)
        for at in range(0, values.numel(), max(1, values.numel() // 5)):
            row, column = divmod(at, shape[1])
            copy[row, column] = 1.0 if values[row, column] != 1.0 else 2.0
        wrong.append(len(range(0, values.numel(), max(1, values.numel() // 5))) if values.numel() else 0)
        pieces.append(TensorPart(values, 5 * n, 3 * n, 1, copy))
        pieces.append(TensorPart(filled(shape, torch.bfloat16), 0, 0))
        wrong.append(0)
    twin = Lanes(pieces)
    taken = Lanes([p._replace(values=p.values.cuda(), copy=None if p.copy is None else p.copy.cuda()) for p in pieces])
    assert torch.equal(taken().cpu(), twin())
    assert taken.unlike.tolist() == twin.unlike.tolist() == wrong


def test_widths_are_mixed_and_memory_is_read_anew():
    torch.manual_seed(0)
    values = [filled((65, 1030), dtype).cuda() for dtype in (torch.float32, torch.bfloat16, torch.uint8)]
    taken = Lanes([TensorPart(value, 0, 0) for value in values])
    first = taken()
    assert torch.equal(first, taken())
    values[1][64, 1029] = -values[1][64, 1029]
    second = taken()
    assert torch.equal(first[[0, 2]], second[[0, 2]])
    assert (first[1] != second[1]).all()
