//! Which chunks a purge is about.

use kv_chunk::KeyParts;
use serde::{Deserialize, Serialize};

/// Chunks of one model, of one tenant, or of one tenant with one model. With neither it selects nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct Selector {
    /// `model` of the namespace, exactly.
    pub model: Option<String>,
    /// The cache salt, exactly; an empty one is that of chunks without a tenant.
    pub salt: Option<Vec<u8>>,
}

impl Selector {
    /// Chunks of one model.
    pub fn model(model: impl Into<String>) -> Self {
        Self { model: Some(model.into()), salt: None }
    }

    /// Chunks of one tenant.
    pub fn salt(salt: impl Into<Vec<u8>>) -> Self {
        Self { model: None, salt: Some(salt.into()) }
    }

    /// Whether the chunk with these canonical key bytes is selected; `None` if they are no key.
    pub fn matches(&self, canonical: &[u8]) -> Option<bool> {
        let parts = KeyParts::parse(canonical).ok()?;
        let model = self.model.as_ref().is_none_or(|model| *model == parts.namespace.model);
        let salt = self.salt.as_ref().is_none_or(|salt| *salt == parts.cache_salt);
        Some(!self.is_empty() && model && salt)
    }

    /// It selects nothing.
    pub fn is_empty(&self) -> bool {
        self.model.is_none() && self.salt.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::key;

    #[test]
    fn a_chunk_is_selected_only_if_all_that_is_named_is_its_own() {
        let key = key(1);
        let matches = |model: Option<&str>, salt: Option<&[u8]>| {
            let selector =
                Selector { model: model.map(str::to_owned), salt: salt.map(<[u8]>::to_vec) };
            selector.matches(key.canonical())
        };
        assert_eq!(matches(Some("test"), None), Some(true));
        assert_eq!(matches(Some("test"), Some(b"")), Some(true));
        assert_eq!(matches(None, Some(b"")), Some(true));
        assert_eq!(matches(Some("tes"), None), Some(false));
        assert_eq!(matches(Some("test"), Some(b"tenant")), Some(false));
        assert_eq!(matches(None, None), Some(false));
        assert_eq!(Selector::model("test").matches(b"noise"), None);
    }
}
