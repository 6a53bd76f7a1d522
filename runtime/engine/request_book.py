"""The unfinished requests of an engine: how they come in and how they end. Runs nothing."""

from __future__ import annotations

import time

from ..sampling import BeamSearchParams
from .beams import BeamRequest
from .errors import RequestError
from .request import Choice, ModelLimits, Request, RequestInput
from .scheduler import Scheduler

__all__ = ["AnyRequest", "RequestBook", "text_of"]

AnyRequest = Request | BeamRequest


class RequestBook:
    """Keeps a request from `add` until its last choice has ended.

    num_searches: beam searches. num_reported: requests that want their prompt's log-probabilities. num_unforked:
    requests with several choices of which only the first has started. A step asks for them to skip work nobody wants.
    """

    def __init__(self, scheduler: Scheduler, limits: ModelLimits) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._requests: dict[str, AnyRequest] = {}
        self.num_searches = 0
        self.num_reported = 0
        self.num_unforked = 0

    def add(self, source: RequestInput) -> AnyRequest:
        """Queues a request. Raises RequestError or SamplingParamsError, and queues nothing, when it can never run."""
        if source.request_id in self._requests:
            raise RequestError(f"request id '{source.request_id}' is in use by a request that has not ended")
        request: AnyRequest
        if isinstance(source.params, BeamSearchParams):
            request = BeamRequest(source, source.params, self.limits)
            self.scheduler.add(request.beams[0].sequence)
            self.num_searches += 1
        else:
            request = Request(source, source.params, self.limits)
            self.scheduler.add(request.choices[0].sequence)
            self.num_unforked += not request.forked
            self.num_reported += request.prompt_logprobs is not None
        self._requests[source.request_id] = request
        return request

    def abort(self, request_id: str, reason: str = "abort", error: str | None = None) -> AnyRequest | None:
        """Ends a request in whatever state it is; None when there is no such request any more."""
        request = self._requests.get(request_id)
        if isinstance(request, BeamRequest):
            request.end(self.scheduler, reason, error)
            self.forget(request)
        elif request is not None:
            for choice in request.choices:
                self.end(choice, reason, error)
        return request

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self._requests)

    @property
    def num_requests(self) -> int:
        """Unfinished requests."""
        return len(self._requests)

    def end(self, choice: Choice, reason: str, error: str | None = None) -> None:
        """Ends a choice, and its request with the last one. Ending it again changes nothing."""
        if choice.sequence.is_finished:
            return
        try:
            choice.cut_short()
        except Exception as failure:  # the text ends where it is, and so does the choice
            error = error or text_of(failure)
        choice.error = error
        self.scheduler.finish(choice.sequence, reason)
        request = choice.request
        request.num_unfinished -= 1
        if not request.forked:
            self.set_forked(request)  # its other choices never started
            for other in request.choices[1:]:
                other.error = error
                other.sequence.discard(reason)
            request.num_unfinished = 0
        if request.is_finished:
            request.finish_time = time.monotonic()
            self.forget(request)

    def forget(self, request: AnyRequest) -> None:
        """Strikes a request that has ended; its name is free again."""
        if self._requests.pop(request.request_id, None) is not None:
            self.num_searches -= isinstance(request, BeamRequest)
            self.num_reported -= request.prompt_logprobs is not None

    def set_forked(self, request: Request) -> None:
        """Notes that all choices of a request have started, or never will."""
        request.forked = True
        self.num_unforked -= 1


def text_of(failure: Exception) -> str:
    """What a request that the engine failed on tells its caller."""
    return f"the engine failed on this request: {type(failure).__name__}: {failure}"
