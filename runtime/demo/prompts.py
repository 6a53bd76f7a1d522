"""The six chats of the demo, from a short question to questions about a text; the last two share that text."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEMO_PROMPTS", "DemoPrompt"]


@dataclass(frozen=True, kw_only=True)
class DemoPrompt:
    """One chat: what is shown as its title, the user's message, and how many tokens the answer may have."""

    title: str
    content: str
    max_tokens: int

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation in the form that chat templates take."""
        return [{"role": "user", "content": self.content}]


_ARTICLE = """\
The Great Barrier Reef lies off the coast of Queensland in northeastern Australia. It is the largest coral reef \
system in the world: about 2,900 separate reefs and 900 islands stretch over 2,300 kilometres, and the whole is so \
large that it can be seen from space. The reef is built by billions of tiny animals, the coral polyps, which live in \
partnership with algae that give them food and colour. More than 1,500 species of fish, 400 species of coral and six \
of the world's seven species of sea turtle live there. Humpback whales come every winter to give birth in its warm \
waters. The greatest danger to the reef is rising water temperature. When the sea is too warm for several weeks, \
corals push out their algae, turn white and may die; scientists call this coral bleaching. Other dangers are \
pollution from farms, ships, and outbreaks of the crown-of-thorns starfish, which eats coral. Since 1981 the reef has \
been a World Heritage Site, and fishing is forbidden in about one third of it. Every year around two million visitors \
come to dive, snorkel and sail there, and tourism brings the region several billion dollars.
"""

DEMO_PROMPTS = (
    DemoPrompt(title="capital", content="What is the capital of France?", max_tokens=64),
    DemoPrompt(title="photosynthesis", content="Explain in two sentences how photosynthesis works.", max_tokens=96),
    DemoPrompt(title="exercise", content="What are three benefits of regular exercise?", max_tokens=96),
    DemoPrompt(
        title="story",
        content="Write the first paragraph of a story about a robot who wants to become a gardener.",
        max_tokens=96,
    ),
    DemoPrompt(
        title="reef: danger",
        content=_ARTICLE + "\nWhat is the greatest danger to the reef, according to the text?",
        max_tokens=96,
    ),
    DemoPrompt(
        title="reef: place",
        content=_ARTICLE + "\nWhere is the Great Barrier Reef and how large is it?",
        max_tokens=96,
    ),
)
