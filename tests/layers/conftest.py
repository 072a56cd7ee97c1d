import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors here are tiny: a second thread only waits, twenty times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
